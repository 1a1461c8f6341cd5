// The whole step in little, and the part of it that the picture shows.

class Minimap {
  constructor(canvas) {
    this.canvas = canvas;
    this.small = null; // all rows, drawn once
  }

  /** Forgets the rows, which are drawn anew when next needed. */
  reset() {
    this.small = null;
  }

  draw(state) {
    const { view, palette, ratio, panels } = state;
    const ranks = panels.reduce((sum, p) => sum + p.ranks, 0);
    const line = Math.max(1, Math.min(5, Math.floor(56 / Math.max(1, ranks))));
    const height = Math.min(120, ranks * line + (panels.length - 1) * 3 + 8);
    const context = prepared(this.canvas, view.width, height, ratio);
    this.left = view.left;
    if (!this.small || this.small.width !== Math.round(view.plot * ratio)) this.rows(state, line, height);
    context.fillStyle = palette.css.paper;
    context.fillRect(0, 0, view.width, height);
    context.putImageData(this.small.image, Math.round(view.left * ratio), 0);
    const [x0, x1] = [this.xOf(view, view.from), this.xOf(view, view.to)];
    context.fillStyle = palette.css.paper;
    context.globalAlpha = 0.6;
    context.fillRect(view.left, 0, x0 - view.left, height);
    context.fillRect(x1, 0, view.width - x1, height);
    context.globalAlpha = 1;
    context.strokeStyle = palette.css.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x0 + 0.75, 0.75, Math.max(3, x1 - x0 - 1.5), height - 1.5);
  }

  rows({ view, palette, ratio, panels }, line, height) {
    const width = Math.max(1, Math.round(view.plot * ratio));
    this.small = new Surface(width, Math.round(height * ratio));
    this.small.flat = true;
    this.small.pixels.fill(palette.paper);
    let top = 4;
    for (const panel of panels) {
      for (let rank = 0; rank < panel.ranks; rank++) {
        const [y, tall] = [Math.round(top * ratio), Math.max(1, Math.round(line * ratio))];
        drawRow(this.small, panel, rank, 0, view.whole, y, tall, palette, Infinity);
        top += line;
      }
      top += 3;
    }
  }

  xOf(view, time) {
    return view.left + (time / view.whole) * view.plot;
  }

  timeAt(view, x) {
    return ((x - view.left) / view.plot) * view.whole;
  }
}
