// What lies above the rows: grid, bounds, what is pointed at, pinned, critical or selected.

class Overlay {
  constructor(canvas) {
    this.canvas = canvas;
  }

  draw(state) {
    const { view, ratio, rows } = state;
    const context = prepared(this.canvas, view.width, view.height, ratio);
    context.clearRect(0, 0, view.width, view.height);
    this.places = new Map(rows.map((row) => [row.panel.number * 1e6 + row.rank, row]));
    context.save();
    context.beginPath();
    context.rect(view.left, AXIS, view.plot, view.height - AXIS);
    context.clip();
    this.grid(context, state);
    this.bounds(context, state);
    if (state.critical) {
      for (const panel of state.panels) this.chain(context, state, panel, panel.criticalPath);
    }
    const { pin, hover } = state;
    if (pin?.event >= 0) this.chain(context, state, pin.panel, state.chain);
    if (hover) this.hovered(context, state, hover);
    if (pin) this.outline(context, state, pin, 3);
    context.restore();
    this.selection(context, state);
  }

  row(panel, rank) {
    return this.places.get(panel.number * 1e6 + rank);
  }

  /** Returns a row's upper edge and height in the picture. */
  edge(view, row) {
    return [AXIS + row.top - view.scroll, row.height];
  }

  grid(context, { view, palette, panels }) {
    context.fillStyle = palette.css.ink;
    context.globalAlpha = 0.1;
    const unit = panels[0]?.unit ?? "s";
    for (const [time] of ticksOf(view.from, view.to, view.plot / 110, unit)) {
      context.fillRect(Math.round(view.xOf(time)), AXIS, 1, view.height);
    }
    context.globalAlpha = 1;
  }

  /** Draws each panel's lower bound through its rows. */
  bounds(context, { view, palette, rows }) {
    context.strokeStyle = palette.css.bound;
    context.lineWidth = 1.5;
    context.setLineDash([5, 4]);
    context.beginPath();
    for (const row of rows) {
      if (row.rank < 0 || !row.panel.bound_s) continue;
      const x = view.xOf(row.panel.bound_s);
      const [top, height] = this.edge(view, row);
      context.moveTo(x, top - GAP);
      context.lineTo(x, top + height + row.memory);
    }
    context.stroke();
    context.setLineDash([]);
  }

  /** Draws a line around an action, or a piece of idle time. */
  outline(context, { view, palette }, { panel, event, piece }, width) {
    if (event >= panel.count) return;
    const idle = event === undefined || event < 0;
    const rank = idle ? rankOfPiece(panel, piece) : panel.rank[event];
    const row = this.row(panel, rank);
    if (!row) return;
    const [from, to] = idle
      ? [panel.pieces.start[piece], panel.pieces.end[piece]]
      : [panel.start[event], panel.end[event]];
    const [top, height] = this.edge(view, row);
    const [x0, x1] = [view.xOf(from), view.xOf(to)];
    context.lineWidth = width;
    context.strokeStyle = palette.css.paper;
    context.strokeRect(x0, top, Math.max(1, x1 - x0), height);
    context.lineWidth = Math.max(1, width - 1.5);
    context.strokeStyle = palette.css.ink;
    context.strokeRect(x0, top, Math.max(1, x1 - x0), height);
  }

  /** Draws what is pointed at: its microbatch on all ranks, and where its values come and go. */
  hovered(context, state, hover) {
    const { view, palette } = state;
    const { panel, event } = hover;
    if (event >= 0 && event < panel.count) {
      const microbatch = panel.microbatches[0][event];
      context.fillStyle = palette.css.ink;
      for (let i = 0; i < panel.count; i++) {
        const same =
          panel.microbatches[0][i] === microbatch || panel.microbatches[1][i] === microbatch;
        if (!same || panel.end[i] < view.from || panel.start[i] > view.to) continue;
        const row = this.row(panel, panel.rank[i]);
        const [top, height] = this.edge(view, row);
        const [x0, x1] = [view.xOf(panel.start[i]), view.xOf(panel.end[i])];
        context.fillRect(x0, top + height - 2, Math.max(1, x1 - x0), 2);
        context.fillRect(x0, top, Math.max(1, x1 - x0), 1);
      }
      for (const side of ["taker", "maker"]) {
        for (const t of transfersOf(panel, event, side)) this.arrow(context, state, panel, t);
      }
    }
    this.outline(context, state, hover, 2);
  }

  /** Draws a transfer from the action that makes its value to the one that takes it. */
  arrow(context, { view, palette }, panel, t) {
    const { start, end, source, target } = panel.transfers;
    const [from, to] = [this.row(panel, source[t]), this.row(panel, target[t])];
    if (!from || !to) return;
    const down = to.top > from.top;
    const [y0, y1] = [from, to].map((row, i) => {
      const [top, height] = this.edge(view, row);
      return down === (i === 0) ? top + height : top;
    });
    const [x0, x1] = [view.xOf(start[t]), view.xOf(end[t])];
    for (const [colour, width] of [
      [palette.css.paper, 3.5],
      [palette.css.accent, 1.5],
    ]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x0, y0);
      context.lineTo(x1, y1);
      const back = down ? -5 : 5;
      context.moveTo(x1 - 3, y1 + back);
      context.lineTo(x1, y1);
      context.lineTo(x1 + 3, y1 + back);
      context.stroke();
    }
  }

  /** Draws a chain of events: a line along its actions, and its transfers as arrows. */
  chain(context, state, panel, chain) {
    const { view, palette } = state;
    context.fillStyle = palette.css.accent;
    for (const event of chain) {
      const transfer = event >= panel.count;
      const t = event - panel.count;
      const [from, to] = transfer
        ? [panel.transfers.start[t], panel.transfers.end[t]]
        : [panel.start[event], panel.end[event]];
      if (to < view.from || from > view.to) continue;
      if (transfer) {
        this.arrow(context, state, panel, t);
        context.fillStyle = palette.css.accent;
        continue;
      }
      const [top, height] = this.edge(view, this.row(panel, panel.rank[event]));
      const [x0, x1] = [view.xOf(from), view.xOf(to)];
      context.fillRect(x0, top - 2, Math.max(1, x1 - x0), 3);
      context.fillRect(x0, top + height - 1, Math.max(1, x1 - x0), 3);
    }
  }

  selection(context, { view, palette, selection }) {
    if (!selection) return;
    const [x0, x1] = selection.map((time) =>
      Math.max(view.left, Math.min(view.width, view.xOf(time))),
    );
    context.fillStyle = palette.css.accent;
    context.globalAlpha = 0.14;
    context.fillRect(x0, 0, x1 - x0, view.height);
    context.globalAlpha = 1;
    context.fillRect(x0, 0, 1, view.height);
    context.fillRect(x1, 0, 1, view.height);
  }
}

/** Returns the rank in whose row a piece lies. */
function rankOfPiece(panel, piece) {
  return above(panel.pieces.first, piece, 0, panel.ranks + 1) - 1;
}
