// The whole step in little, and the part of it that the picture shows.

class Minimap {
  /** `canvas` holds all rows, drawn once; `frame` is moved over it. */
  constructor(canvas, frame) {
    this.canvas = canvas;
    this.frame = frame;
    this.drawn = null; // what the canvas shows: width and palette
  }

  /** Forgets the rows, which are drawn anew when next needed. */
  reset() {
    this.drawn = null;
  }

  draw(state) {
    const { view, ratio } = state;
    const drawn = `${view.width} ${view.left} ${ratio}`;
    if (this.drawn !== drawn) this.rows(state);
    this.drawn = drawn;
    const [x0, x1] = [view.from, view.to].map((time) => (time / view.whole) * view.plot);
    // moved without a new layout; its shadow dims what is not shown
    this.frame.style.transform = `translateX(${x0}px)`;
    this.frame.style.width = `${Math.max(4, x1 - x0)}px`;
  }

  rows({ view, palette, ratio, panels }) {
    const ranks = panels.reduce((sum, p) => sum + p.ranks, 0);
    const line = Math.max(1, Math.min(5, Math.floor(56 / Math.max(1, ranks))));
    const height = Math.min(120, ranks * line + Math.max(0, panels.length - 1) * 3 + 8);
    const context = prepared(this.canvas, view.plot, height, ratio);
    const small = new Surface(this.canvas.width, this.canvas.height);
    small.flat = true;
    small.pixels.fill(palette.paper);
    let top = 4;
    for (const panel of panels) {
      for (let rank = 0; rank < panel.ranks; rank++) {
        const [y, tall] = [Math.round(top * ratio), Math.max(1, Math.round(line * ratio))];
        drawRow(small, panel, rank, 0, view.whole, y, tall, palette, Infinity);
        top += line;
      }
      top += 3;
    }
    context.putImageData(small.image, 0, 0);
    this.canvas.parentElement.style.marginLeft = `${view.left}px`;
  }

  timeAt(view, x) {
    return (x / view.plot) * view.whole;
  }
}
