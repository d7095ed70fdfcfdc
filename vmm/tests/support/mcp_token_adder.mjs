// Stands between a client that knows no tokens and a server that asks for one.
// Arguments: the server's address and the token. Prints its own address.
import http from "node:http";

const [address, token] = process.argv.slice(2);
const { hostname, port } = new URL(address);

const adder = http.createServer((request, response) => {
  const headers = { ...request.headers, authorization: `Bearer ${token}` };
  const { method, url: path } = request;
  const onward = http.request({ hostname, port, path, method, headers }, (answer) => {
    response.writeHead(answer.statusCode, answer.headers);
    answer.pipe(response);
  });
  onward.on("error", () => response.destroy());
  response.on("close", () => onward.destroy());
  request.pipe(onward);
});
adder.listen(0, "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${adder.address().port}/mcp`);
});
