// What keys, buttons and the mouse do to the viewer's state.

/** The part of the viewer that people command; `Viewer` has the state and draws it. */
class Commands {
  toggle(name) {
    this.state[name] = !this.state[name];
    this.applyState();
  }

  setQuery(text) {
    this.state.query = text;
    this.state.match = -1;
    this.applyState();
  }

  showCount() {
    const { matches, match } = this.state;
    const which = match >= 0 ? `${match + 1} of ` : "";
    this.count.textContent = matches ? `${which}${matches.length}` : "";
  }

  focusSearch() {
    this.box.focus();
    this.box.select();
  }

  nextMatch(step) {
    const { state } = this;
    if (!state.matches?.length) return;
    const count = state.matches.length;
    state.match =
      state.match < 0 ? (step > 0 ? 0 : count - 1) : (state.match + step + count) % count;
    const { panel, event } = state.matches[state.match];
    this.go(panel, event);
  }

  /** Pins an event and brings it into view. */
  go(panel, event) {
    const { state } = this;
    state.pin = { panel, event };
    const [from, to] = spanOf(panel, event);
    const { view } = state;
    const shown = view.to - view.from;
    if (from < view.from || to > view.to) {
      const middle = (from + to) / 2;
      const half = Math.max(shown, 1.2 * (to - from)) / 2;
      view.show(middle - half, middle + half);
    }
    const rank =
      event < panel.count ? panel.rank[event] : panel.transfers.source[event - panel.count];
    this.reveal(panel, rank);
    this.applyState();
    this.say(event < panel.count ? actionLines(panel, event).join(". ") : nameOf(panel, event));
  }

  reveal(panel, rank) {
    const { view, rows } = this.state;
    const row = rows.find((r) => r.panel === panel && r.rank === rank);
    if (!row) return;
    const room = view.height - AXIS;
    if (row.top < view.scroll) view.scrollTo(row.top - HEAD);
    else if (row.top + row.height + row.memory > view.scroll + room) {
      view.scrollTo(row.top + row.height + row.memory - room + HEAD);
    }
  }

  /** Returns what lies at a place of the picture: `{panel, event, piece}`, or null. */
  thingAt(x, y) {
    const { view, rows } = this.state;
    if (x < view.left) return null;
    const row = view.rowAt(rows, y);
    if (!row || row.rank < 0) return null;
    const piece = pieceAt(row.panel, row.rank, view.timeAt(x));
    if (piece < 0) return null;
    const { code, of } = row.panel.pieces;
    const inMemory = y - AXIS + view.scroll > row.top + row.height;
    return {
      panel: row.panel,
      rank: row.rank,
      piece,
      inMemory,
      event: code[piece] < IDLE ? of[piece] : -1,
    };
  }

  pinAt(x, y) {
    const thing = this.thingAt(x, y);
    this.state.pin = thing && { panel: thing.panel, event: thing.event, piece: thing.piece };
    this.applyState();
  }

  /** Pins the next action of the pinned one's rank, or the one before it. */
  step(by) {
    const { pin, panels } = this.state;
    if (!(pin?.event >= 0) || pin.event >= pin.panel.count) {
      if (panels[0]?.count) this.go(panels[0], 0);
      return;
    }
    const { panel, event } = pin;
    const rank = panel.rank[event];
    const next = Math.max(panel.first[rank], Math.min(panel.first[rank + 1] - 1, event + by));
    this.go(panel, next);
  }

  /** Pins what a neighbouring rank does at the middle of the pinned action. */
  stepRank(by) {
    const { pin } = this.state;
    if (!(pin?.event >= 0) || pin.event >= pin.panel.count) return this.step(0);
    const { panel, event } = pin;
    const rank = panel.rank[event] + by;
    if (rank < 0 || rank >= panel.ranks || panel.first[rank] === panel.first[rank + 1]) return;
    const middle = (panel.start[event] + panel.end[event]) / 2;
    const i = above(panel.end, middle, panel.first[rank], panel.first[rank + 1]);
    this.go(panel, Math.min(i, panel.first[rank + 1] - 1));
  }

  followBack() {
    const { pin } = this.state;
    if (!pin) return;
    const gap = pin.event >= 0 ? -1 : pin.panel.pieces.of[pin.piece];
    const before =
      pin.event >= 0 ? beforeOf(pin.panel, pin.event) : gap >= 0 ? pin.panel.gaps.on[gap] : -1;
    if (before >= 0) this.go(pin.panel, before);
  }

  pinSpan() {
    const { pin } = this.state;
    if (!pin) return null;
    if (pin.event >= 0) return spanOf(pin.panel, pin.event);
    const { start, end } = pin.panel.pieces;
    return [start[pin.piece], end[pin.piece]];
  }

  fitPin() {
    const span = this.pinSpan();
    if (!span) return;
    const room = 2 * (span[1] - span[0]) || this.state.view.extent / 100;
    this.state.view.show(span[0] - room, span[1] + room);
    this.moved();
  }

  selectKey() {
    const { view } = this.state;
    this.select(...(this.pinSpan() ?? [view.from, view.to]));
  }

  /** Selects a span of time; null selects nothing. */
  select(from, to) {
    const { state } = this;
    const most = state.view.extent;
    const cut = (time) => Math.max(0, Math.min(most, time));
    state.selection = from === null ? null : [cut(Math.min(from, to)), cut(Math.max(from, to))];
    if (state.selection && state.selection[0] === state.selection[1]) state.selection = null;
    this.details.draw(state);
    this.request();
    this.remember();
  }

  clear() {
    Object.assign(this.state, { pin: null, selection: null, query: "", match: -1 });
    this.box.blur();
    this.leave();
    this.applyState();
  }

  fit() {
    const { view } = this.state;
    view.show(0, view.whole);
    this.moved();
  }

  zoomKey(factor) {
    const { view } = this.state;
    const inside = this.pointer && this.pointer.x >= view.left;
    view.zoom(factor, inside ? this.pointer.x : view.left + view.plot / 2);
    this.moved();
  }

  panKey(share, rows) {
    const { view } = this.state;
    view.pan(share * view.plot, rows);
    this.moved();
  }

  help() {
    document.getElementById("helping").showModal();
  }
}
