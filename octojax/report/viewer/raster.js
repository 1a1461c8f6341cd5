// Rows as pixels. Every column of pixels shows exactly the shares of its time: a piece that covers
// it fills it, several narrower ones stand one above the other, and what rounding takes from one
// column the next gives back. So busy time is never drawn as idle, at any zoom.

/** Pixels to draw on, with a picture to put on a canvas. */
class Surface {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.flat = false; // without hatching
  }

  /** Fills columns `x0` to `x1` and lines `y0` to `y1`, cut to the surface. */
  fill(x0, x1, y0, y1, look) {
    const { width, pixels } = this;
    const [top, bottom] = [Math.max(0, y0), Math.min(this.height, y1)];
    const { base, line } = look;
    const tile = x1 - x0 < 3 || this.flat ? null : look.tile;
    for (let y = top; y < bottom; y++) {
      const at = y * width;
      // a call costs more than a few numbers do
      if (x1 - x0 > 24) pixels.fill(base, at + x0, at + x1);
      else for (let i = at + x0; i < at + x1; i++) pixels[i] = base;
      if (tile === null) continue;
      const row = ((y - y0) % TILE) * TILE;
      for (let x = 0; x < TILE; x++) {
        if (tile[row + x]) for (let i = at + x0 + x; i < at + x1; i += TILE) pixels[i] = line;
      }
    }
  }

  /** Fills `count` pixels of a column, from line `bottom` upwards; returns the line above them. */
  stack(x, bottom, count, pixel) {
    const { width, pixels } = this;
    const upper = bottom - count;
    const end = Math.max(0, upper) * width + x;
    for (let i = (Math.min(bottom, this.height) - 1) * width + x; i >= end; i -= width) {
      pixels[i] = pixel;
    }
    return upper;
  }

  plain(x0, x1, y0, y1, pixel) {
    for (let y = Math.max(0, y0); y < Math.min(this.height, y1); y++) {
      this.pixels.fill(pixel, y * this.width + x0, y * this.width + x1);
    }
  }
}

const DIMMED = 2 * SHADES; // added to a variant
const SLOTS = 2 * CODES; // shares of a column: of every code, and of every code dimmed
const shares = new Float64Array(SLOTS);
const carried = new Float64Array(SLOTS);
const active = new Int32Array(SLOTS);

/** Draws one rank's row and returns the wide pieces `[piece, x0, x1]` that have room for a label.
 *
 * `from` and `to` are the times at the surface's edges; `least` is the width that a label needs.
 */
function drawRow(surface, panel, rank, from, to, top, height, palette, least) {
  const { start, end, code, of, first } = panel.pieces;
  const { looks, pixels } = palette;
  const { mask, shade } = panel;
  const scale = surface.width / (to - from);
  const wide = [];
  let column = -1;
  let slots = 0;
  carried.fill(0);

  const add = (x, slot, share) => {
    if (!(share > 0)) return;
    if (x !== column) {
      if (column >= 0) flush();
      column = x;
    }
    if (shares[slot] === 0) active[slots++] = slot;
    shares[slot] += share;
  };
  const flush = () => {
    // whole pixels to each by what it is owed, the largest remainders first
    let total = 0;
    let given = 0;
    for (let i = 0; i < slots; i++) {
      const slot = active[i];
      total += shares[slot];
      carried[slot] += shares[slot] * height;
      shares[slot] = Math.max(0, Math.floor(carried[slot]));
      given += shares[slot];
    }
    let left = Math.min(height, Math.round(total * height)) - given;
    for (; left > 0; left--) {
      let best = active[0];
      for (let i = 1; i < slots; i++) {
        const slot = active[i];
        if (carried[slot] - shares[slot] > carried[best] - shares[best]) best = slot;
      }
      shares[best]++;
    }
    // busy kinds from the bottom up, idle time above
    let bottom = top + height;
    for (let i = 0; i < slots; i++) {
      let least = i;
      for (let j = i + 1; j < slots; j++) if (active[j] < active[least]) least = j;
      const slot = active[least];
      active[least] = active[i];
      const count = Math.min(shares[slot], bottom - top);
      carried[slot] -= shares[slot];
      shares[slot] = 0;
      if (count) bottom = surface.stack(column, bottom, count, pixels[slot]);
    }
    slots = 0;
  };
  const share = (x, what, dim, part) => {
    const offset = dim ? CODES : 0;
    if (what === OVERLAP) {
      add(x, offset + 0, part / 2);
      add(x, offset + 1, part / 2);
    } else add(x, offset + what, part);
  };

  const last = first[rank + 1];
  for (let i = above(end, from, first[rank], last); i < last && start[i] < to; i++) {
    const what = code[i];
    const action = what < IDLE ? of[i] : -1;
    const dim = mask !== null && (action < 0 || !mask[action]);
    const a = Math.max(0, (start[i] - from) * scale);
    const b = Math.min(surface.width, (end[i] - from) * scale);
    let x0 = Math.floor(a);
    const x1 = Math.floor(b);
    if (x0 === x1) {
      if (x0 < surface.width) share(x0, what, dim, b - a);
      continue;
    }
    if (a > x0) share(x0, what, dim, ++x0 - a);
    if (x1 > x0) {
      let variant = dim ? DIMMED : 0;
      if (action >= 0) variant += shade[action] + SHADES * ((action - panel.first[rank]) & 1);
      if (what === OVERLAP) {
        const middle = top + (height >> 1);
        surface.fill(x0, x1, top, middle, looks[0][variant]);
        surface.fill(x0, x1, middle, top + height, looks[1][variant]);
      } else surface.fill(x0, x1, top, top + height, looks[what][variant]);
      if (action >= 0 && x1 - x0 >= least) wide.push([action, x0, x1, variant]);
    }
    if (b > x1 && x1 < surface.width) share(x1, what, dim, b - x1);
  }
  if (slots) flush();
  return wide;
}

/** Draws a rank's memory: of each column the most, on the rank's own scale. */
function drawMemory(surface, panel, rank, from, to, top, height, palette) {
  const { first, time, level } = panel.memory;
  const [begin, last] = [first[rank], first[rank + 1]];
  const most = memoryScale(panel, rank);
  if (!most) return;
  const scale = surface.width / (to - from);
  const stop = Math.min(surface.width, Math.ceil((panel.makespan_s - from) * scale));
  let i = above(time, from, begin, last);
  let now = i > begin ? level[i - 1] : 0;
  let x = Math.max(0, Math.floor((0 - from) * scale));
  let before = -1;
  while (x < stop) {
    const until = from + (x + 1) / scale;
    let peak = now;
    for (; i < last && time[i] <= until; i++) {
      now = level[i];
      if (now > peak) peak = now;
    }
    let next = x + 1;
    if (peak === now) {
      // nothing changes before the next point: one fill for all columns until then
      next = i < last ? Math.floor((time[i] - from) * scale) : stop;
      next = Math.min(stop, Math.max(x + 1, next));
    }
    const y = top + height - Math.round((peak / most) * height);
    surface.plain(x, next, y, top + height, palette.memory);
    surface.plain(x, next, y, y + 1, palette.memoryEdge);
    if (before >= 0 && before !== y) {
      surface.plain(x, x + 1, Math.min(before, y), Math.max(before, y), palette.memoryEdge);
    }
    before = y;
    x = next;
  }
  const capacity = panel.capacities_bytes[rank];
  if (!capacity || capacity > most) return;
  const y = top + height - Math.round((capacity / most) * height);
  for (let at = 0; at < stop; at += 6) {
    surface.plain(at, Math.min(stop, at + 4), y, y + 1, palette.capacity);
  }
}

/** Returns the bytes at the top of a rank's scale: its peak, or its capacity where that is near. */
function memoryScale(panel, rank) {
  const [peak, capacity] = [panel.peaks[rank], panel.capacities_bytes[rank]];
  return capacity && capacity < 3 * peak ? Math.max(peak, capacity) : peak;
}
