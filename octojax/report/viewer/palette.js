// Colours and hatching. The colours themselves stand in the style sheet, for light and dark.

const SHADES = 4;
const TILE = 8; // side of a hatching's tile, in pixels

// Which pixels of a tile are darker (or lighter): kinds differ by this besides their hue.
const HATCHING = {
  F: null,
  B: (x, y) => (x + y) % 4 === 0,
  I: (x, y) => (x - y + TILE) % 4 === 0,
  W: (x, y) => x % 4 === 1 && y % 4 === 1,
  R: (x, y) => y % 4 === 2,
  "fill and drain": null,
  dependency: (x, y) => (x + y) % 8 === 0,
  transfer: (x, y) => x % 4 === 0 && y % 4 === 0,
  host: (x, y) => y % 8 === 3,
  imbalance: (x) => x % 8 === 3,
};

function tileOf(name) {
  const draws = HATCHING[name];
  if (!draws) return null;
  const tile = new Uint8Array(TILE * TILE);
  for (let y = 0; y < TILE; y++) for (let x = 0; x < TILE; x++) tile[y * TILE + x] = draws(x, y);
  return tile;
}

function parsed(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

function mixed(one, other, share) {
  return one.map((v, i) => Math.round(v + (other[i] - v) * share));
}

/** Returns a colour as the number that a pixel holds (little-endian RGBA). */
function pixelOf([r, g, b]) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

function textOf(colour) {
  return `#${colour.map((v) => v.toString(16).padStart(2, "0")).join("")}`;
}

function luminance(colour) {
  const linear = colour.map((v) => {
    const c = v / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

/** Returns WCAG's contrast of two colours, from 1 to 21. */
function contrast(one, other) {
  const [a, b] = [luminance(one) + 0.05, luminance(other) + 0.05];
  return Math.max(a, b) / Math.min(a, b);
}

const BLACK = [0, 0, 0];
const WHITE = [255, 255, 255];

/** Returns black or white, whichever stands out more on all of these colours. */
function readable(colours) {
  const least = (text) => Math.min(...colours.map((colour) => contrast(text, colour)));
  return least(WHITE) > least(BLACK) ? WHITE : BLACK;
}

/** Returns all looks under the page's present theme.
 *
 * `looks[code][variant]` has pixels `base` and `line`, the hatching's `tile` and the colour of
 * `text`. A variant is `shade + SHADES * odd + 2 * SHADES * dimmed`.
 */
function paletteOf(element) {
  const style = getComputedStyle(element);
  const colour = (name) => parsed(style.getPropertyValue(`--${name}`).trim());
  const paper = colour("paper");
  const dark = luminance(paper) < 0.2;
  const look = (base, tile, strength) => {
    const line = mixed(base, luminance(base) < 0.12 ? WHITE : BLACK, strength);
    return { base: pixelOf(base), line: pixelOf(line), tile };
  };
  const looks = [];
  for (let code = 0; code < CODES; code++) {
    if (code === OVERLAP) {
      looks.push(null);
      continue;
    }
    const idle = code >= IDLE;
    const name = idle ? CAUSES[code - IDLE] : KINDS[code];
    const tile = tileOf(name);
    const own = colour(idle ? `cause-${code - IDLE}` : `kind-${name}`);
    const variants = [];
    for (let v = 0; v < 4 * SHADES; v++) {
      const [shade, odd, dimmed] = [v % SHADES, (v >> 2) & 1, v >> 3];
      let base = own;
      let text = BLACK;
      if (!idle) {
        base = mixed(base, dark ? paper : WHITE, Math.min(0.16 * shade, 0.48));
        const pair = [base, mixed(base, BLACK, 0.14)];
        base = pair[odd];
        text = readable(pair); // neighbours write in one colour, where it can be read on both
        if (Math.min(...pair.map((c) => contrast(text, c))) < 4.5) text = readable([base]);
      }
      if (dimmed) {
        base = mixed(base, paper, 0.72);
        text = mixed(readable([base]), base, 0.55);
      }
      variants.push({
        ...look(base, tile, dimmed ? 0.08 : idle ? 0.25 : 0.22),
        text: textOf(text),
      });
    }
    looks.push(variants);
  }
  // of a column's shares: every code, and every code dimmed
  const pixels = new Uint32Array(2 * CODES);
  looks.forEach((variants, code) => {
    if (variants)
      [pixels[code], pixels[code + CODES]] = [variants[0].base, variants[2 * SHADES].base];
  });
  const text = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    looks,
    pixels,
    paper: pixelOf(paper),
    memory: pixelOf(colour("memory")),
    memoryEdge: pixelOf(colour("soft")),
    capacity: pixelOf(colour("bound")),
    css: Object.fromEntries(
      ["paper", "ink", "soft", "line", "bound", "accent"].map((name) => [name, text(name)]),
    ),
  };
}
