// The official client of MCP, against forge-vmm mcp. Arguments: how to reach
// it (stdio COMMAND ARGUMENT... or http ADDRESS TOKEN). Prints "ok" at the end.
import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const [how, ...rest] = process.argv.slice(2);

function transport() {
  if (how === "stdio") {
    const [command, ...args] = rest;
    return new StdioClientTransport({ command, args, env: process.env, stderr: "inherit" });
  }
  const [address, token] = rest;
  const requestInit = { headers: { Authorization: `Bearer ${token}` } };
  return new StreamableHTTPClientTransport(new URL(address), { requestInit });
}

const client = new Client({ name: "sdk", version: "1" });
await client.connect(transport());

// Lists the tools first: the SDK then holds every result against its schema.
const { tools } = await client.listTools();
assert.deepEqual(tools.map((tool) => tool.name), ["search_tools", "run_program"]);

const found = await client.callTool({
  name: "search_tools",
  arguments: { intent: "How many parts of a kind are in stock?" },
});
const { grant } = found.structuredContent;
assert.ok(found.structuredContent.tools.some((tool) => tool.name === "inventory.get_stock"));

const { resources } = await client.listResources();
const { uri } = resources.find((resource) => resource.name === "example.wat");
const { contents } = await client.readResource({ uri });
const program = contents[0].text;

const heard = [];
const result = await client.callTool(
  // Its call waits for the disk, which others may be writing to.
  { name: "run_program", arguments: { program, grant, limits: { timeout_ms: 30000 } } },
  undefined,
  { onprogress: (progress) => heard.push(progress.message) },
);
assert.equal(result.isError, false, JSON.stringify(result));
assert.equal(JSON.parse(result.content[0].text).available, 480);
assert.equal(result.structuredContent.tool_calls[0].tool, "inventory.get_stock");
assert.equal(heard[0], "submitted");

const refused = await client.callTool({ name: "run_program", arguments: { program } });
assert.equal(refused.isError, true);
assert.equal(refused.structuredContent.status, "rejected");

// A request that is given up, and the connection is as good as before.
const endless = `(module (memory (export "memory") 1)
  (func (export "forge_run") (result i32) (loop (br 0)) (unreachable)))`;
const limits = { timeout_ms: 30000, fuel: 1e12 };
const giveUp = new AbortController();
const given = client.callTool(
  { name: "run_program", arguments: { program: endless, limits } },
  undefined,
  { signal: giveUp.signal, onprogress: () => giveUp.abort("changed my mind") },
);
await assert.rejects(given);
await client.ping();

await client.close();
console.log("ok");
