// Mouse, wheel and keys.

const WHEEL = 0.0022; // how fast the wheel zooms
const CLICK = 4; // pixels that a press may move and still be a click

/** Listens to the picture: wheel zooms at the cursor, drag moves, shift and drag selects. */
function listenToPicture(element, viewer) {
  const { state } = viewer;
  let press = null;
  const place = (e) => {
    const box = element.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  };
  element.addEventListener(
    "wheel",
    (e) => {
      e.preventDefault();
      const [x] = place(e);
      const pixels = e.deltaMode === 1 ? 16 : 1; // lines or pixels
      if (x < state.view.left && !e.ctrlKey) {
        state.view.scrollTo(state.view.scroll + e.deltaY * pixels);
      } else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
        state.view.pan((e.deltaX || e.deltaY) * pixels);
      } else state.view.zoom(Math.exp(e.deltaY * pixels * WHEEL), x);
      viewer.moved();
    },
    { passive: false },
  );
  element.addEventListener("pointerdown", (e) => {
    if (e.button !== 0) return;
    const [x, y] = place(e);
    element.setPointerCapture(e.pointerId);
    element.focus();
    const selects = e.shiftKey || (y < AXIS && x >= state.view.left);
    press = { x, y, lastX: x, lastY: y, selects, moved: false };
  });
  element.addEventListener("pointermove", (e) => {
    const [x, y] = place(e);
    viewer.pointer = { x, y };
    if (!press) {
      viewer.hover(x, y, e.clientX, e.clientY);
      return;
    }
    press.moved ||= Math.hypot(x - press.x, y - press.y) >= CLICK;
    if (!press.moved) return;
    viewer.leave();
    if (press.selects) viewer.select(state.view.timeAt(press.x), state.view.timeAt(x));
    else {
      state.view.pan(press.lastX - x, press.lastY - y);
      viewer.moved();
    }
    press.lastX = x;
    press.lastY = y;
  });
  element.addEventListener("pointerup", () => {
    if (press && !press.moved) {
      if (press.selects) viewer.select(null);
      else viewer.pinAt(press.x, press.y);
    }
    press = null;
  });
  element.addEventListener("pointercancel", () => (press = null));
  element.addEventListener("pointerleave", () => {
    viewer.pointer = null;
    viewer.leave();
  });
}

/** Listens to the small picture: a press or drag brings that time into the middle. */
function listenToMinimap(element, viewer) {
  const { view } = viewer.state;
  let pressed = false;
  const go = (e) => {
    const box = element.getBoundingClientRect();
    const time = viewer.minimap.timeAt(view, e.clientX - box.left);
    const half = (view.to - view.from) / 2;
    view.show(time - half, time + half);
    viewer.moved();
  };
  element.addEventListener("pointerdown", (e) => {
    pressed = true;
    element.setPointerCapture(e.pointerId);
    go(e);
  });
  element.addEventListener("pointermove", (e) => pressed && go(e));
  element.addEventListener("pointerup", () => (pressed = false));
}

const STEP = 0.12; // of the picture's width, that a key moves
const ZOOM = 0.8; // what a key zooms by

/** What keys do; shown by `?`. Keys of one line do the same. */
const KEYS = [
  [["w", "+", "="], "zoom in, at the cursor if it is on the picture", (v) => v.zoomKey(ZOOM)],
  [["s", "-"], "zoom out", (v) => v.zoomKey(1 / ZOOM)],
  [["a", "ArrowLeft"], "earlier", (v) => v.panKey(-STEP, 0)],
  [["d", "ArrowRight"], "later", (v) => v.panKey(STEP, 0)],
  [["ArrowUp"], "rows above", (v) => v.panKey(0, -60)],
  [["ArrowDown"], "rows below", (v) => v.panKey(0, 60)],
  [["0", "Home"], "the whole step", (v) => v.fit()],
  [["/"], "search for an action (3F7), layer, microbatch, stage or rank", (v) => v.focusSearch()],
  [["n"], "next of what was searched", (v) => v.nextMatch(1)],
  [["N"], "the one before", (v) => v.nextMatch(-1)],
  [["]", "Shift+ArrowRight"], "pin the next action of the rank", (v) => v.step(1)],
  [["[", "Shift+ArrowLeft"], "pin the action before", (v) => v.step(-1)],
  [["Shift+ArrowDown"], "pin what the rank below does meanwhile", (v) => v.stepRank(1)],
  [["Shift+ArrowUp"], "pin what the rank above does meanwhile", (v) => v.stepRank(-1)],
  [["b"], "pin what the pinned action followed", (v) => v.followBack()],
  [["f"], "zoom to what is pinned", (v) => v.fitPin()],
  [["x"], "select the time of what is pinned, or what is shown", (v) => v.selectKey()],
  [["c"], "critical path", (v) => v.toggle("critical")],
  [["m"], "memory", (v) => v.toggle("memory")],
  [["g"], "rows of one rank together, of several timelines", (v) => v.toggle("grouped")],
  [["Escape"], "let go of pin, selection and search", (v) => v.clear()],
  [["?"], "this list", (v) => v.help()],
];

function listenToKeys(viewer) {
  const actions = new Map(KEYS.flatMap(([keys, , run]) => keys.map((key) => [key, run])));
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.target.closest("input, select, dialog")) {
      if (e.key === "Escape") viewer.clear();
      return;
    }
    if (e.target.closest("button, summary") && [" ", "Enter"].includes(e.key)) return;
    const arrow = e.shiftKey && e.key.startsWith("Arrow");
    const run = actions.get(arrow ? `Shift+${e.key}` : e.key);
    if (!run) return;
    e.preventDefault();
    run(viewer);
  });
}
