//! A message of a server, as the MCP library is to read it.
//!
//! The library reads a result into types of its own, which keep the members that
//! they know and numbers of their own width (a priority of 0.7 in 32 bits is
//! 0.699999988079071), and take no list of blocks with one that they do not
//! know. What a tool answered is for the program, so it passes the library as a
//! result of no type that it knows, behind one member, and comes out as it came.
//!
//! An error passes as one, with a number and a text, whatever it is written as.

use forge_protocol::json;
use rmcp::RoleClient;
use rmcp::model::{CustomResult, ErrorCode, JsonRpcMessage, RequestId, ServerResult};
use rmcp::service::RxJsonRpcMessage;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Error, Value, json};

use super::unread::SMALL_BYTES_MAX;

/// The member that it stands behind.
const AS_IT_CAME: &str = "forge-vmm/as-it-came";

/// Which results those are: a tool's (MCP's `CallToolResult`) by any of the first
/// three, a resource's (`ReadResourceResult`) by the last.
const MEMBERS: [&str; 4] = ["content", "structuredContent", "isError", "contents"];

/// What of a message says what its result is, without it.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(default)]
    jsonrpc: Value,
    #[serde(default)]
    id: Value,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    error: Option<IgnoredAny>,
    method: Option<IgnoredAny>,
}

/// A result as it came.
#[derive(Debug, PartialEq)]
pub(super) enum Came {
    /// Read.
    Read(Value),
    /// A large one, not read.
    Text(String),
}

impl Came {
    /// The result itself; none where that is no JSON.
    pub(super) fn read(self) -> Option<Value> {
        match self {
            Self::Read(result) => Some(result),
            Self::Text(text) => json::from_slice_mended(text.as_bytes()).ok(),
        }
    }
}

/// Reads a message.
///
/// # Errors
/// As [`json::from_slice_mended`].
pub(super) fn read(text: &[u8]) -> Result<Value, Error> {
    if text.len() > SMALL_BYTES_MAX
        && let Some(message) = unread_end(text)
    {
        return Ok(message);
    }
    let mut message: Value = json::from_slice_mended(text)?;
    // Also what a server put behind that member itself: it is its result as it came, and
    // no text that we left unread.
    let passes = |result: &Value| passes(result) || result.get(AS_IT_CAME).is_some();
    if let Some(result) = message.get_mut("result").filter(|result| passes(result)) {
        *result = json!({ AS_IT_CAME: result.take() });
    }
    // An answer of the older JSON-RPC has both, one of them null.
    if let Some(members) = message.as_object_mut()
        && let Some(error) = members.remove("error")
        && !error.is_null()
    {
        if members.get("result").is_some_and(Value::is_null) {
            members.remove("result");
        }
        members.insert("error".to_owned(), specified(error));
    }
    Ok(message)
}

/// A message whose result, what a call or a reading came to, is left as its text; `None`
/// for any other, and for what is to be mended first.
fn unread_end(text: &[u8]) -> Option<Value> {
    #[derive(Deserialize)]
    struct Members {
        content: Option<IgnoredAny>,
        #[serde(rename = "structuredContent")]
        structured: Option<IgnoredAny>,
        contents: Option<IgnoredAny>,
        #[serde(default, rename = "resultType")]
        kind: Value,
    }
    // Values are read here too, and no text among them anew.
    json::check(text).ok()?;
    let Envelope { jsonrpc, id, result, error, method } = serde_json::from_slice(text).ok()?;
    let result = result.filter(|_| error.is_none() && method.is_none())?.get();
    let Members { content, structured, contents, kind } = serde_json::from_str(result).ok()?;
    let has_members = content.is_some() || structured.is_some() || contents.is_some();
    (has_members && is_complete(&kind))
        .then(|| json!({ "jsonrpc": jsonrpc, "id": id, "result": { AS_IT_CAME: result } }))
}

/// Whether this answers `server/discover` as something else.
pub(super) fn is_of_another_request(message: &RxJsonRpcMessage<RoleClient>) -> bool {
    match message {
        JsonRpcMessage::Response(said) => !matches!(said.result, ServerResult::DiscoverResult(_)),
        _ => false,
    }
}

/// Which request a message from the server answers.
pub(super) fn answers(message: &RxJsonRpcMessage<RoleClient>) -> Option<&RequestId> {
    match message {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        _ => None,
    }
}

/// An error as JSON-RPC 2.0 has it (section 5.1). Servers that write their own put a word
/// for its number, or a text for the whole: what has no place then is among its data.
fn specified(error: Value) -> Value {
    let number = |code: &Value| code.as_i64().and_then(|code| i32::try_from(code).ok());
    let code = number(&error["code"]);
    if code.is_some() && error["message"].is_string() {
        return error;
    }
    let said = error["message"].as_str().or(error.as_str());
    json!({
        "code": code.unwrap_or(ErrorCode::INTERNAL_ERROR.0),
        "message": said.unwrap_or("an error without a message"),
        "data": error,
    })
}

/// Whether it is what passes the library unread: what a call or a reading came to, or a
/// list with a tool of a kind that the library does not tell from others.
fn passes(result: &Value) -> bool {
    let tools = result.get("tools").and_then(Value::as_array);
    is_an_end(result) || tools.is_some_and(|tools| tools.iter().any(is_a_task))
}

/// Whether a tool, as it is listed, is called as a task alone.
pub(super) fn is_a_task(tool: &Value) -> bool {
    tool["execution"]["taskSupport"] == "required"
}

/// Whether it is what a call or a reading came to. Of another type than that it is
/// complete, it is a question or a promise.
fn is_an_end(result: &Value) -> bool {
    is_complete(&result["resultType"]) && MEMBERS.iter().any(|member| result.get(member).is_some())
}

fn is_complete(kind: &Value) -> bool {
    kind.is_null() || kind == "complete"
}

/// The result behind what the library made of it, if it was one of those.
pub(super) fn as_it_came(CustomResult(mut result): CustomResult) -> Option<Came> {
    Some(match result.get_mut(AS_IT_CAME)?.take() {
        Value::String(text) => Came::Text(text),
        read => Came::Read(read),
    })
}

/// The same of a list, which may be none of those: what the library could not read of
/// itself it hands over as well.
pub(super) fn unread(CustomResult(mut result): CustomResult) -> Value {
    match result.get_mut(AS_IT_CAME) {
        Some(came) => came.take(),
        None => result,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rmcp::model::ServerResult;

    use super::*;

    /// What the library makes of a result.
    pub(in super::super) fn through(result: &Value) -> ServerResult {
        let message = json!({ "jsonrpc": "2.0", "id": 1, "result": result });
        let message = read(message.to_string().as_bytes()).unwrap();
        match RxJsonRpcMessage::<RoleClient>::deserialize(message).unwrap() {
            JsonRpcMessage::Response(said) => said.result,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_a_tool_answered_passes_the_library_as_it_came() {
        for result in [
            json!({"content": [{"type": "text", "text": "x", "annotations": {"priority": 0.7},
                "_meta": {"a": 1}, "beside": true}], "resultType": "complete", "more": [0.1]}),
            json!({"content": "none"}),
            json!({"structuredContent": null}),
            json!({"isError": true}),
            json!({"contents": [{"uri": "a:b", "text": "x", "beside": 1}]}),
        ] {
            match through(&result) {
                ServerResult::CustomResult(said) => {
                    assert_eq!(as_it_came(said), Some(Came::Read(result)))
                }
                other => panic!("{result}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_large_answer_passes_as_its_text_and_is_the_same_when_it_is_read() {
        let many: Vec<Value> = (0..10_000).map(|n| json!({ "a": n })).collect();
        for result in [
            json!({"structuredContent": {"many": many}, "isError": true}),
            json!({"content": many, "resultType": "complete"}),
            json!({"contents": many}),
        ] {
            let ServerResult::CustomResult(said) = through(&result) else { panic!("{result}") };
            let came = as_it_came(said).unwrap();
            assert!(matches!(came, Came::Text(_)), "{came:?}");
            assert_eq!(came.read(), Some(result));
        }
        let asks = json!({"resultType": "input_required", "content": many, "inputRequests": {}});
        assert!(matches!(through(&asks), ServerResult::InputRequiredResult(_)));
        let tools: Vec<Value> = (0..500)
            .map(|n| json!({"name": n.to_string(), "inputSchema": {"a": "b".repeat(90)}}))
            .collect();
        assert!(matches!(through(&json!({ "tools": tools })), ServerResult::ListToolsResult(_)));
    }

    #[test]
    fn a_text_within_a_message_is_never_read_as_one() {
        let text = format!("[{}0]", "0,".repeat(100_000));
        let raw = json!({ "$serde_json::private::RawValue": text });
        let end = json!({ "content": [] });
        for message in [
            json!({"jsonrpc": raw, "id": 1, "result": end}),
            json!({"jsonrpc": "2.0", "id": raw, "result": end}),
            json!({"jsonrpc": "2.0", "id": 1, "result": {"content": [], "resultType": raw}}),
        ] {
            assert!(read(message.to_string().as_bytes()).is_err());
        }
        let behind = json!({ AS_IT_CAME: "{\"content\": []}" });
        match through(&behind) {
            ServerResult::CustomResult(said) => {
                assert_eq!(as_it_came(said), Some(Came::Read(behind)));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_no_tools_answer_is_the_librarys_to_read() {
        let tools = json!({ "tools": [] });
        assert!(matches!(through(&tools), ServerResult::ListToolsResult(_)));
        let asks = json!({ "resultType": "input_required", "inputRequests": {}, "content": [] });
        assert!(matches!(through(&asks), ServerResult::InputRequiredResult(_)));
        assert!(matches!(through(&json!({})), ServerResult::EmptyResult(_)));
        match through(&json!({ "what": 1 })) {
            ServerResult::CustomResult(said) => assert_eq!(as_it_came(said), None),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_error_is_one_however_it_is_written_and_nothing_of_it_is_lost() {
        let through = |error: &Value| {
            let message = json!({ "jsonrpc": "2.0", "id": 1, "error": error });
            let message = read(message.to_string().as_bytes()).unwrap();
            match RxJsonRpcMessage::<RoleClient>::deserialize(message).unwrap() {
                JsonRpcMessage::Error(said) => said.error,
                other => panic!("{other:?}"),
            }
        };
        let known = through(&json!({"code": -32602, "message": "no such part", "data": [7]}));
        assert_eq!((known.code.0, &*known.message), (-32602, "no such part"));
        assert_eq!(known.data, Some(json!([7])));
        for (error, code, message) in [
            (json!({"code": "E_PART", "message": "no such part"}), -32603, "no such part"),
            (json!({"code": 1e12, "message": "no such part"}), -32603, "no such part"),
            (json!({"message": "no such part"}), -32603, "no such part"),
            (json!({"code": 7, "detail": "x"}), 7, "an error without a message"),
            (json!({"code": 7, "message": {"text": "x"}}), 7, "an error without a message"),
            (json!("no such part"), -32603, "no such part"),
            (json!([]), -32603, "an error without a message"),
        ] {
            let said = through(&error);
            assert_eq!((said.code.0, &*said.message), (code, message));
            assert_eq!(said.data, Some(error));
        }
    }

    #[test]
    fn of_a_result_and_an_error_the_one_that_is_null_is_none() {
        let read = |message: Value| {
            let read = read(message.to_string().as_bytes()).unwrap();
            RxJsonRpcMessage::<RoleClient>::deserialize(read).unwrap()
        };
        let result = json!({"jsonrpc": "2.0", "id": 1, "result": {"isError": true}, "error": null});
        assert!(matches!(read(result), JsonRpcMessage::Response(_)));
        let error = json!({"jsonrpc": "2.0", "id": 1, "result": null, "error": "no such part"});
        assert!(matches!(read(error), JsonRpcMessage::Error(_)));
    }
}
