// Where things stand: the rows of the picture, and the part of time that it shows.

const HEAD = 24; // height of a panel's heading
const GAP = 4; // between rows
const AXIS = 24; // height of the time axis
const MEMORY = 18; // height of a rank's memory
const ROOMY = 26; // height of a row, where there is room
const TIGHT = 12; // where there are many
const CLOSEST = 1e-6; // of the step, in view at most; a page holds times that are finer than a pixel then

/** Returns the rows, from top to bottom: headings, and ranks with their memory.
 *
 * One panel after the other, or (`grouped`) the rows of one rank of all panels together.
 */
function rowsOf(panels, { grouped, memory, room }) {
  const ranks = panels.reduce((sum, p) => sum + p.ranks, 0);
  const shown = (panel) => memory && panel.memory.time.length > panel.ranks;
  const lanes = panels.reduce((sum, p) => sum + (shown(p) ? p.ranks : 0), 0);
  const free = room - panels.length * HEAD - lanes * (MEMORY + 2) - ranks * GAP - GAP;
  const height = Math.max(TIGHT, Math.min(ROOMY, Math.floor(free / Math.max(1, ranks))));
  const rows = [];
  let top = 0;
  const head = (panel) => {
    rows.push({ panel, rank: -1, top, height: HEAD, memory: 0 });
    top += HEAD;
  };
  const row = (panel, rank) => {
    const lane = shown(panel) ? MEMORY : 0;
    rows.push({ panel, rank, top, height, memory: lane });
    top += height + (lane ? lane + 2 : 0) + GAP;
  };
  if (grouped) {
    panels.forEach(head);
    const most = Math.max(0, ...panels.map((p) => p.ranks));
    for (let rank = 0; rank < most; rank++) {
      for (const panel of panels) if (rank < panel.ranks) row(panel, rank);
      top += 2 * GAP;
    }
  } else {
    for (const panel of panels) {
      head(panel);
      for (let rank = 0; rank < panel.ranks; rank++) row(panel, rank);
      top += GAP;
    }
  }
  return { rows, height: top + GAP };
}

/** The part of time and of the rows that is shown, and the picture's size in CSS pixels. */
class View {
  constructor(extent) {
    this.extent = extent || 1; // the longest step
    this.from = 0;
    this.to = this.whole;
    this.scroll = 0;
    this.left = 96; // width of the names
    this.width = 800; // of all
    this.height = 400;
    this.rowsHeight = 0;
  }

  get whole() {
    return this.extent * 1.01;
  }

  get plot() {
    return Math.max(1, this.width - this.left);
  }

  xOf(time) {
    return this.left + ((time - this.from) / (this.to - this.from)) * this.plot;
  }

  timeAt(x) {
    return this.from + ((x - this.left) / this.plot) * (this.to - this.from);
  }

  /** Shows a span of time, cut to the step. */
  show(from, to) {
    const span = Math.min(this.whole, Math.max(this.extent * CLOSEST, to - from));
    this.from = Math.max(0, Math.min(this.whole - span, from));
    this.to = this.from + span;
  }

  /** Shows `factor` times as much time; what stands at `x` stays there. */
  zoom(factor, x) {
    const time = this.timeAt(x);
    const span = Math.min(
      this.whole,
      Math.max(this.extent * CLOSEST, (this.to - this.from) * factor),
    );
    const from = time - ((x - this.left) / this.plot) * span;
    this.show(from, from + span);
  }

  pan(dx, dy = 0) {
    const shift = (dx / this.plot) * (this.to - this.from);
    this.show(this.from + shift, this.to + shift);
    this.scrollTo(this.scroll + dy);
  }

  scrollTo(y) {
    const most = Math.max(0, this.rowsHeight + AXIS - this.height);
    this.scroll = Math.max(0, Math.min(most, y));
  }

  /** Returns the row at a height of the picture, or undefined. */
  rowAt(rows, y) {
    const at = y - AXIS + this.scroll;
    if (y < AXIS) return undefined;
    return rows.find(
      (row) => at >= row.top && at < row.top + row.height + (row.memory ? row.memory + 2 : 0),
    );
  }
}
