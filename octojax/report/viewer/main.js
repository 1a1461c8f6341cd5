// The viewer: its state, what changes it, and one drawing per frame.

class Viewer {
  constructor(panels) {
    const byId = (id) => document.getElementById(id);
    const extent = Math.max(0, ...panels.map((p) => p.makespan_s));
    const ranks = panels.reduce((sum, p) => sum + p.ranks, 0);
    this.state = {
      panels,
      view: new View(extent),
      rows: [],
      ratio: 1,
      palette: null,
      hover: null, // {panel, event, piece}: what is pointed at
      pin: null, // the same, kept; event may be a transfer's
      chain: [], // of events that lead to what is pinned
      query: "",
      matches: null,
      match: -1,
      selection: null, // [from, to]
      critical: false,
      grouped: false,
      memory: ranks <= 16,
      memoryByDefault: ranks <= 16,
      theme: "auto",
    };
    this.stage = byId("stage");
    this.tip = byId("tip");
    this.said = byId("said");
    this.box = byId("query");
    this.count = byId("count");
    this.picture = new Picture(byId("picture"));
    this.overlay = new Overlay(byId("overlay"));
    this.minimap = new Minimap(...byId("minimap").children);
    this.details = new Details(byId("details"), (panel, event) => this.go(panel, event));
    this.pointer = null;
    this.frames = []; // milliseconds of CPU that the last frames took
    this.wanted = { all: false, over: false };
    readAddress(this.state, location.hash);
    this.applyTheme();
    this.applyState();
    this.resize();
    this.listen(byId);
  }

  listen(byId) {
    listenToPicture(this.stage, this);
    listenToMinimap(byId("minimap"), this);
    listenToKeys(this);
    new ResizeObserver(() => this.resize()).observe(byId("middle"));
    addEventListener("resize", () => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.applyTheme());
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) === this.address) return;
      readAddress(this.state, location.hash);
      this.applyTheme();
      this.applyState();
      this.resize();
    });
    this.box.addEventListener("input", () => this.setQuery(this.box.value));
    this.box.addEventListener("keydown", (e) => {
      if (e.key !== "Enter") return;
      this.nextMatch(e.shiftKey ? -1 : 1);
      e.preventDefault();
    });
    for (const name of ["critical", "memory", "grouped"]) {
      byId(name).addEventListener("click", () => this.toggle(name));
    }
    byId("grouped").hidden = this.state.panels.length < 2;
    byId("fit").addEventListener("click", () => this.fit());
    byId("help").addEventListener("click", () => this.help());
    byId("theme").addEventListener("change", (e) => {
      this.state.theme = e.target.value;
      this.applyTheme();
      this.remember();
    });
    const list = byId("keys");
    for (const [keys, what] of KEYS) {
      list.append(node("dt", {}, ...keys.flatMap((key) => [node("kbd", {}, key), " "])), node("dd", {}, what));
    }
  }

  // --- what changes the state -------------------------------------------------------------

  /** After a change of theme: reads the colours anew. */
  applyTheme() {
    const { theme } = this.state;
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    document.getElementById("theme").value = theme;
    this.state.palette = paletteOf(document.documentElement);
    this.minimap.reset();
    drawLegend(document.getElementById("legend"), this.state);
    this.request();
  }

  /** After a change of anything but the view: search, dimming, buttons, text. */
  applyState() {
    const { state } = this;
    state.matches = search(state.panels, state.query);
    if (this.box.value !== state.query) this.box.value = state.query;
    this.showCount();
    state.chain = state.pin?.event >= 0 ? chainTo(state.pin.panel, state.pin.event) : [];
    for (const name of ["critical", "memory", "grouped"]) {
      document.getElementById(name).setAttribute("aria-pressed", String(state[name]));
    }
    this.applyMasks();
    this.minimap.reset();
    this.details.draw(state);
    this.layOut();
    this.request();
    this.remember();
  }

  /** Dims what was not searched, or does not belong to the critical path. */
  applyMasks() {
    const { panels, matches, critical } = this.state;
    for (const panel of panels) panel.mask = matches || critical ? new Uint8Array(panel.count) : null;
    if (matches) for (const { panel, event } of matches) panel.mask[event] = 1;
    else if (critical) {
      for (const panel of panels) {
        for (const event of panel.criticalPath) if (event < panel.count) panel.mask[event] = 1;
      }
    }
  }

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
    state.match = state.match < 0 ? (step > 0 ? 0 : count - 1) : (state.match + step + count) % count;
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
    const rank = event < panel.count ? panel.rank[event] : panel.transfers.source[event - panel.count];
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
    return { panel: row.panel, rank: row.rank, piece, inMemory, event: code[piece] < IDLE ? of[piece] : -1 };
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
    const before = pin.event >= 0 ? beforeOf(pin.panel, pin.event) : gap >= 0 ? pin.panel.gaps.on[gap] : -1;
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

  // --- what is pointed at -----------------------------------------------------------------

  hover(x, y, clientX, clientY) {
    const thing = this.thingAt(x, y);
    const row = this.state.view.rowAt(this.state.rows, y);
    if (!thing && !(row && (x < this.state.view.left || row.rank < 0))) return this.leave();
    this.state.hover = thing;
    this.request("over");
    const { panel, rank } = row;
    let lines;
    if (!thing) lines = rank < 0 ? [panel.heading, panel.note].filter(Boolean) : rankLines(panel, rank, this.state.panels[0]);
    else if (thing.inMemory) lines = memoryLines(panel, rank, this.state.view.timeAt(x));
    else if (thing.event >= 0) lines = actionLines(panel, thing.event);
    else lines = [...idleLines(panel, thing.piece), `rank ${rank}`];
    if (this.state.panels.length > 1) lines.push(`${panel.letter}: ${panel.title}`);
    this.tip.replaceChildren(...lines.map((line, i) => node(i ? "div" : "strong", {}, line)));
    this.tip.hidden = false;
    const box = this.tip.getBoundingClientRect();
    const left = clientX + 16 + box.width > innerWidth ? clientX - box.width - 12 : clientX + 16;
    const top = clientY + 18 + box.height > innerHeight ? clientY - box.height - 12 : clientY + 18;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${Math.max(0, top)}px`;
  }

  leave() {
    this.tip.hidden = true;
    if (!this.state.hover) return;
    this.state.hover = null;
    this.request("over");
  }

  /** Returns `[time, label]` of the marks on the axis. */
  ticks() {
    const { view, panels } = this.state;
    return ticksOf(view.from, view.to, view.plot / 110, panels[0]?.unit ?? "s");
  }

  /** Tells people who listen instead of looking. */
  say(text) {
    this.said.textContent = text;
  }

  // --- drawing ----------------------------------------------------------------------------

  moved() {
    this.leave();
    this.request();
    this.remember();
  }

  resize() {
    const { state } = this;
    const middle = document.getElementById("middle");
    const width = Math.max(240, Math.floor(document.getElementById("pictures").clientWidth));
    state.ratio = devicePixelRatio || 1;
    state.view.width = width;
    state.view.left = width < 500 ? 64 : 96;
    this.layOut();
    middle.style.setProperty("--height", `${state.view.height}px`);
    this.request();
  }

  layOut() {
    const { state } = this;
    const room = Math.max(240, innerHeight - 230);
    const { rows, height } = rowsOf(state.panels, { ...state, room: room - AXIS });
    state.rows = rows;
    state.view.rowsHeight = height;
    state.view.height = Math.min(height + AXIS, room);
    this.stage.style.height = `${state.view.height}px`;
    state.view.scrollTo(state.view.scroll);
  }

  /** Asks for a drawing with the next frame: of all, or of what lies above the rows. */
  request(what = "all") {
    const idle = !this.wanted.all && !this.wanted.over;
    this.wanted[what] = true;
    if (idle) requestAnimationFrame(() => this.draw());
  }

  draw() {
    const begin = performance.now();
    const { all } = this.wanted;
    this.wanted = { all: false, over: false };
    if (all) {
      this.picture.draw(this.state);
      this.minimap.draw(this.state);
    }
    this.overlay.draw(this.state);
    this.frames.push(performance.now() - begin);
    if (this.frames.length > 240) this.frames.shift();
  }

  /** Writes the state into the address, once it has come to rest. */
  remember() {
    clearTimeout(this.remembering);
    this.remembering = setTimeout(() => {
      this.address = addressOf(this.state);
      history.replaceState(null, "", this.address ? `#${this.address}` : location.pathname + location.search);
    }, 150);
  }
}

/** Shows every kind and cause that there is, as it is drawn. */
function drawLegend(element, { panels, palette }) {
  const codes = new Set();
  for (const panel of panels) {
    for (const kind of panel.kinds) codes.add(KINDS.indexOf(kind));
    const { code, first } = panel.pieces;
    for (let i = 0; i < first[panel.ranks]; i++) if (code[i] >= IDLE) codes.add(code[i]);
  }
  element.replaceChildren();
  for (const code of [...codes].sort((a, b) => a - b)) {
    const swatch = node("canvas", { width: 22, height: 14, ariaHidden: "true" });
    const surface = new Surface(22, 14);
    surface.fill(0, 22, 0, 14, palette.looks[code][0]);
    swatch.getContext("2d").putImageData(surface.image, 0, 0);
    const name = code < OVERLAP ? `${KINDS[code]} ${KIND_NAMES[KINDS[code]]}` : `bubble: ${CAUSES[code - IDLE]}`;
    element.append(node("span", { title: code < OVERLAP ? "" : CAUSE_NAMES[CAUSES[code - IDLE]] }, swatch, name));
  }
  element.append(node("span", { className: "soft" }, "3F7: stage 3, forward, microbatch 7; paler: a rank's later stages"));
}

async function start() {
  const message = document.getElementById("loading");
  if (typeof DecompressionStream === "undefined") {
    message.textContent = "This browser is too old for this page: it lacks DecompressionStream (2023).";
    return;
  }
  try {
    const data = JSON.parse(document.getElementById("data").textContent);
    const panels = await Promise.all(data.map(readPanel));
    message.remove();
    document.getElementById("middle").hidden = false;
    window.octopipe = new Viewer(panels); // for tests, and for the curious
  } catch (error) {
    message.textContent = `This page is damaged: ${error.message}`;
    throw error;
  }
}

start();
