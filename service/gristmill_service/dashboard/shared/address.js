// The page's address selects what it shows: `#/RUN/BATCH/UID/MODEL.MINI_BATCH.RANK`, where all parts except the run are
// optional. A group that is not sealed has no batch: `#/RUN//UID/ROUND`.
export function addressOf({ run, batch = "", uid = "", shard = null, round = 0 }) {
  const place = shard === null ? round || "" : `${shard.model}.${shard.miniBatch}.${shard.rank}`;
  return `#/${[run, batch, uid, place].map(encodeURIComponent).join("/").replace(/\/+$/, "")}`;
}

export function readAddress(hash) {
  const [run = "", batch = "", uid = "", place = ""] = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (batch === "") return { run, batch: null, uid: "", shard: null, group: uid ? { uid, round: Number(place) } : null };
  const [model, miniBatch, rank] = place.split(".");
  return { run, batch: Number(batch), uid, shard: place ? { model, miniBatch: Number(miniBatch), rank: Number(rank) } : null, group: null };
}
