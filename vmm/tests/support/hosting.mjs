// Hosts a tool for a run, over the WebSocket of the HTTP door. Arguments: the
// door's address, a token, a program, and `dies` if this is to be killed when
// its tool is called. Prints "ok" at the end.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import WebSocket from "ws";

const [address, token, program, dies] = process.argv.slice(2);

const own = {
  "app.price": ({ part_id, available }) => {
    assert.equal(part_id, "P-1001");
    return { cents: 12 * available };
  },
};

const socket = new WebSocket(`${address.replace(/^http/, "ws")}/v1/runs/ws`, {
  headers: { Authorization: `Bearer ${token}` },
});
const send = (message) => socket.send(JSON.stringify(message));

socket.on("open", () => {
  const run = {
    program: readFileSync(program).toString("base64"),
    tools: ["inventory.get_stock"],
    limits: { wall_ms: 30000 },
  };
  const tools = [{ name: "price", input_schema: { type: "object" } }];
  send({ submit: { number: 1, run, hosted: { server: "app", tools } } });
});

let priced;
socket.on("message", (text) => {
  const { callback, finished, problem } = JSON.parse(text);
  assert.equal(problem, undefined, String(text));
  if (callback) {
    if (dies) process.kill(process.pid, "SIGKILL");
    priced = own[callback.tool](callback.arguments);
    send({ settle: { number: 1, callback: callback.callback, result: priced } });
  } else if (finished) {
    const { status, output, tool_calls } = finished.report;
    assert.equal(status, "ok", JSON.stringify(finished.report));
    assert.deepEqual(JSON.parse(output), priced);
    const called = tool_calls.map((call) => call.tool);
    assert.deepEqual(called, ["inventory.get_stock", "app.price"]);
    console.log("ok");
    socket.close();
  }
});
