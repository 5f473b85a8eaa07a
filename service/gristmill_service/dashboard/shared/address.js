// What is looked at stands in the page's address: `#/RUN/BATCH/UID/MODEL.MINI_BATCH.RANK`, of which all but the run may lack.
export function addressOf({ run, batch = "", uid = "", shard = null }) {
  const place = shard === null ? "" : `${shard.model}.${shard.miniBatch}.${shard.rank}`;
  return `#/${[run, batch, uid, place].map(encodeURIComponent).join("/").replace(/\/+$/, "")}`;
}

export function readAddress(hash) {
  const [run = "", batch = "", uid = "", place = ""] = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const [model, miniBatch, rank] = place.split(".");
  return { run, batch: batch === "" ? null : Number(batch), uid, shard: place ? { model, miniBatch: Number(miniBatch), rank: Number(rank) } : null };
}
