// The picture below everything that moves: rows, labels, names and the time axis.

const FONT_SIZES = [11, 9, 7]; // in which a label is tried, until one fits
const DIGIT = 0.62; // width of a digit, of its font's size
const FONT = "ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif";

/** Sets a canvas to a size in CSS pixels, and returns its context in those. */
function prepared(canvas, width, height, ratio) {
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d", { alpha: canvas.id !== "picture" });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

class Picture {
  constructor(canvas) {
    this.canvas = canvas;
    this.surface = null;
  }

  draw(state) {
    const { view, rows, palette, ratio } = state;
    const context = prepared(this.canvas, view.width, view.height, ratio);
    const width = Math.max(1, Math.round(view.plot * ratio));
    const height = Math.max(1, Math.round((view.height - AXIS) * ratio));
    if (this.surface?.width !== width || this.surface?.height !== height) {
      this.surface = new Surface(width, height);
    }
    const { surface } = this;
    surface.pixels.fill(palette.paper);
    const labels = [];
    const visible = rows.filter((row) => {
      const bottom = row.top + row.height + row.memory + GAP;
      return bottom > view.scroll && row.top < view.scroll + view.height;
    });
    for (const row of visible) {
      if (row.rank < 0) continue;
      const top = Math.round((row.top - view.scroll) * ratio);
      const tall = Math.round(row.height * ratio);
      const { panel, rank } = row;
      const least = 11 * ratio;
      const wide = drawRow(
        surface,
        panel,
        rank,
        view.from,
        view.to,
        top,
        tall,
        palette,
        row.height < 11 ? Infinity : least,
      );
      if (wide.length) labels.push([row, wide]);
      if (row.memory) {
        const at = Math.round((row.top + row.height + 2 - view.scroll) * ratio);
        const size = Math.round(row.memory * ratio);
        drawMemory(surface, panel, rank, view.from, view.to, at, size, palette);
      }
    }
    context.fillStyle = palette.css.paper;
    context.fillRect(0, 0, view.width, view.height);
    context.putImageData(surface.image, Math.round(view.left * ratio), Math.round(AXIS * ratio));
    for (const [row, wide] of labels) this.label(context, state, row, wide);
    for (const row of visible) this.name(context, state, row);
    this.axis(context, state);
  }

  /** Writes into wide actions what has room: the name, or the microbatch, rather large than small. */
  label(context, { view, palette, ratio }, row, wide) {
    const { panel } = row;
    const { looks } = palette;
    const sizes = FONT_SIZES.filter((size) => size <= row.height - 2);
    const y = AXIS + row.top - view.scroll + row.height / 2 + 0.5;
    let font = 0;
    const write = (text, size, x, at, look) => {
      if (size !== font) context.font = `${(font = size)}px ${FONT}`;
      context.fillStyle = look.text;
      context.fillText(text, x, at);
    };
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [action, x0, x1, variant] of wide) {
      const room = (x1 - x0) / ratio - 2;
      const fits = (text) => sizes.find((size) => text.length * DIGIT * size <= room);
      const x = view.left + (x0 + x1) / 2 / ratio;
      const name = partText(panel, action, 0);
      if (panel.kind[action] === OVERLAP) {
        const names = [name, partText(panel, action, 1)];
        if (row.height < 20 || !names.every(fits)) continue;
        names.forEach((text, half) => {
          write(text, 8, x, y + (half - 0.5) * (row.height / 2), looks[half][variant]);
        });
        continue;
      }
      const look = looks[panel.kind[action]][variant];
      const microbatch = String(panel.microbatches[0][action]);
      const text = fits(name) ? name : microbatch;
      const size = fits(text);
      if (size) write(text, size, x, y, look);
    }
  }

  /** Writes what stands left of a row, and a panel's heading. */
  name(context, { view, palette, panels, grouped }, row) {
    const y = AXIS + row.top - view.scroll;
    const { panel, rank } = row;
    context.textBaseline = "middle";
    if (rank < 0) {
      context.font = `600 13px ${FONT}`;
      context.textAlign = "left";
      context.fillStyle = palette.css.ink;
      const letter = panels.length > 1 ? `${panel.letter}  ` : "";
      context.fillText(
        fitted(context, letter + panel.heading, view.width - 16),
        8,
        y + row.height / 2 + 2,
      );
      return;
    }
    context.fillStyle = palette.css.line;
    context.fillRect(view.left - 1, y, 1, row.height + (row.memory ? row.memory + 2 : 0));
    context.textAlign = "right";
    const x = view.left - 8;
    const idle = 1 - panel.busy_s[rank] / (panel.makespan_s || 1);
    const name = grouped && panels.length > 1 ? `${panel.letter} ${rank}` : `rank ${rank}`;
    const two = row.height >= 22;
    context.font = `${Math.min(12, row.height)}px ${FONT}`;
    context.fillStyle = palette.css.ink;
    context.fillText(name, x, y + (two ? row.height / 2 - 5 : row.height / 2));
    context.fillStyle = palette.css.soft;
    if (two) {
      context.font = `9px ${FONT}`;
      const base = panels[0];
      let text = `idle ${(100 * idle).toFixed(1)} %`;
      if (panel !== base && rank < base.ranks && base.makespan_s && base.unit === panel.unit) {
        const more = panel.busy_s[rank] - base.busy_s[rank];
        if (Math.abs(more) > 1e-6 * base.makespan_s) {
          text = `busy ${differenceText(more, panel.unit)}`;
        }
      }
      context.fillText(text, x, y + row.height / 2 + 7);
    }
    if (row.memory && panel.peaks[rank]) {
      context.font = `9px ${FONT}`;
      const middle = y + row.height + 2 + row.memory / 2;
      const capacity = panel.capacities_bytes[rank];
      const over = capacity && panel.peaks[rank] > capacity;
      context.fillStyle = over ? palette.css.bound : palette.css.soft;
      context.fillText(bytesText(panel.peaks[rank]), x, middle - (capacity ? 4 : 0));
      if (capacity) context.fillText(`of ${bytesText(capacity)}`, x, middle + 5);
    }
  }

  /** Draws the time axis, which stays above the rows. */
  axis(context, { view, palette, panels }) {
    context.fillStyle = palette.css.paper;
    context.fillRect(0, 0, view.width, AXIS);
    context.fillStyle = palette.css.soft;
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const unit = panels[0]?.unit ?? "s";
    for (const [time, label] of ticksOf(view.from, view.to, view.plot / 110, unit)) {
      const x = view.xOf(time);
      const half = context.measureText(label).width / 2;
      if (x - half > view.left - 40 && x + half < view.width) {
        context.fillText(label, x, AXIS / 2 - 1);
      }
      context.fillRect(Math.round(x), AXIS - 5, 1, 5);
    }
    context.fillStyle = palette.css.line;
    context.fillRect(view.left, AXIS - 1, view.plot, 1);
  }
}

/** Returns a text, cut so that it is no wider than there is room. */
function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > room) length--;
  return `${text.slice(0, length)}…`;
}
