// Canvases that are sharp on every screen and follow the page's colors.
const drawn = new Map();

// draw(context, width, height) in CSS pixels; called again when the width or the colors change.
export function canvas(label, height, draw) {
  const node = document.createElement("canvas");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
  node.style.height = `${height}px`;
  const redraw = () => {
    const width = node.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    node.width = Math.round(width * ratio);
    node.height = Math.round(height * ratio);
    const context = node.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    draw(context, width, height);
  };
  drawn.set(node, redraw);
  return { node, redraw };
}

export function redrawAll() {
  for (const [node, redraw] of drawn) node.isConnected ? redraw() : drawn.delete(node);
}
let waiting = 0;
const later = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redrawAll); };
window.addEventListener("resize", later);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);

export function colors(...names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Rounds a coordinate to a whole device pixel.
export const snap = value => {
  const ratio = window.devicePixelRatio || 1;
  return Math.round(value * ratio) / ratio;
};

// Makes a picture interactive: pointer and arrow keys select an item, which is described below; a click or Enter opens it.
export function walkable(shape, { find, move, describe, open, readout }) {
  const { node, redraw } = shape;
  node.tabIndex = 0;
  node.setAttribute("role", "application");
  let chosen = null;
  const choose = item => {
    if (JSON.stringify(item) === JSON.stringify(chosen)) return;
    chosen = item;
    shape.chosen = item;
    readout.textContent = item == null ? "" : describe(item);
    redraw();
  };
  node.addEventListener("pointermove", event => choose(find(event.offsetX, event.offsetY)));
  node.addEventListener("pointerleave", () => choose(null));
  node.addEventListener("blur", () => choose(null));
  node.addEventListener("focus", () => { if (chosen == null && node.matches(":focus-visible")) choose(move(null, 0, 0)); });
  if (open) {
    node.classList.add("opens");
    node.addEventListener("click", () => { if (chosen != null) open(chosen); });
  }
  node.addEventListener("keydown", event => {
    if (event.key === "Enter" && open && chosen != null) open(chosen);
    const [right, down] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] ?? [0, 0];
    if (!right && !down) return;
    event.preventDefault();
    choose(move(chosen, right, down));
  });
}

export const readout = hint => {
  const node = document.createElement("p");
  node.className = "readout small";
  node.setAttribute("role", "status");
  node.textContent = hint;
  return node;
};
