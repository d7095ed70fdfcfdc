// The forge ABI (docs/abi.md) for AssemblyScript: texts and JSON in place of
// pointers and lengths.

import { Json } from "./json";

@external("forge", "input_len") declare function input_len(): i32;
@external("forge", "input_read") declare function input_read(to: usize, offset: i32, length: i32): i32;
@external("forge", "resp_len") declare function resp_len(): i32;
@external("forge", "resp_read") declare function resp_read(to: usize, offset: i32, length: i32): i32;
@external("forge", "output") declare function forge_output(at: usize, length: i32): i32;
@external("forge", "log") declare function forge_log(level: i32, at: usize, length: i32): void;
@external("forge", "artifact") declare function forge_artifact(
  name: usize, nameLength: i32, type: usize, typeLength: i32, at: usize, length: i32): i32;

// A tool import: request pointer and length, then a length or a code below 0.
export type Tool = (request: usize, length: i32) => i32;

// How a call settled.
export class Answer {
  constructor(
    public code: i32, // 0, or the ABI's code of why there is no response
    public body: Json, // the response, or what is told about the failure
  ) {}

  get failed(): bool {
    return this.code < 0;
  }
}

export function input(): Json {
  const buffer = new ArrayBuffer(input_len());
  input_read(changetype<usize>(buffer), 0, buffer.byteLength);
  return Json.parse(String.UTF8.decode(buffer));
}

// A text as UTF-8. Half of a character, which is left where a text is cut through an emoji,
// becomes a replacement character: alone it is no UTF-8, and costs all of the text.
function utf8(text: string): ArrayBuffer {
  return String.UTF8.encode(text, false, String.UTF8.ErrorMode.REPLACE);
}

export function call(tool: Tool, request: string): Answer {
  const bytes = utf8(request);
  const code = tool(changetype<usize>(bytes), bytes.byteLength);
  const buffer = new ArrayBuffer(resp_len());
  resp_read(changetype<usize>(buffer), 0, buffer.byteLength);
  return new Answer(min(code, 0), Json.parse(String.UTF8.decode(buffer)));
}

export function print(text: string): void {
  const bytes = utf8(text + "\n");
  forge_output(changetype<usize>(bytes), bytes.byteLength);
}

export function artifact(name: string, mediaType: string, text: string): void {
  const nameBytes = utf8(name);
  const typeBytes = utf8(mediaType);
  const bytes = utf8(text);
  forge_artifact(
    changetype<usize>(nameBytes), nameBytes.byteLength,
    changetype<usize>(typeBytes), typeBytes.byteLength,
    changetype<usize>(bytes), bytes.byteLength);
}

// Logs an error and gives the code that `forge_run` fails with.
export function fail(what: string, answer: Answer): i32 {
  error(what + ": " + answer.body.get("error").text + " (code " + answer.code.toString() + ")");
  return 1;
}

function error(text: string): void {
  const bytes = utf8(text);
  forge_log(0, changetype<usize>(bytes), bytes.byteLength);
}

// For `asc --use abort=lib/forge/forge_abort` (the path of this file as the program imports
// it): what is thrown and what fails an assertion is logged, with its place, before the trap.
export function forge_abort(message: string | null, file: string | null, line: u32, column: u32): void {
  const place = (file ? file : "?") + ":" + line.toString() + ":" + column.toString();
  error((message ? message : "aborted") + " at " + place);
  unreachable();
}
