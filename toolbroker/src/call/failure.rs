//! Why a call gave no response, and how its program is told.

use forge_protocol::abi::CallCode;
use forge_protocol::name::ToolName;
use serde_json::{Value, json};

use crate::budget::Spent;
use crate::constraint::Violation;
use crate::definition::Violations;
use crate::registry::LookupError;
use crate::review::Unreviewed;
use crate::upstream::{ERROR_TEXT_BYTES_MAX, Undone, Unusable};

/// Why a call gave no response.
#[derive(Debug, thiserror::Error)]
pub enum CallFailure {
    /// The grant does not name the tool.
    #[error("this run's grant does not allow {tool}")]
    NotGranted {
        /// The tool.
        tool: ToolName,
    },
    /// The server describes the tool otherwise than when it was granted.
    #[error(
        "the definition of {tool} changed since it was granted: look at it with `forge-vmm tools \
         review`, approve it and grant it anew"
    )]
    DefinitionChanged {
        /// The tool.
        tool: ToolName,
    },
    /// The definition is not the one that the operator approves of by now.
    #[error("{0}")]
    NotReviewed(Unreviewed),
    /// The request is over the run's limit.
    #[error("the request has {got} bytes, the limit is {limit}")]
    RequestTooLarge {
        /// Its size.
        got: usize,
        /// The limit.
        limit: u32,
    },
    /// The tool is not there, or its server cannot be asked.
    #[error("{0}")]
    NoSuchTool(LookupError),
    /// The request is no JSON object.
    #[error("the request is not a JSON object: {why}")]
    NotAnObject {
        /// What it is.
        why: String,
    },
    /// A number in the request would reach the tool as another.
    #[error(
        "the number at byte {at} of the request is neither an integer of 64 bits nor as a double \
         is written: the tool would get another; send it as text, if the tool takes that"
    )]
    InexactNumber {
        /// Where it begins.
        at: usize,
    },
    /// The request is not what the schema asks.
    #[error("the arguments do not fit the tool's schema: {}", .0.texts.join("; "))]
    BadArguments(Violations),
    /// The arguments fit, and there is no request that has them.
    #[error("the arguments cannot be sent to the tool: {why}")]
    Unsendable {
        /// Which of them, and why.
        why: String,
    },
    /// The arguments are outside what the grant allows.
    #[error("a call of {tool} is not allowed with these arguments: {violation}")]
    OutsideGrant {
        /// The tool.
        tool: ToolName,
        /// The constraint that does not hold.
        violation: Violation,
    },
    /// A budget is used up.
    #[error("{0}")]
    BudgetSpent(Spent),
    /// The deadline passed before dispatch.
    #[error("the run's time was over before the call")]
    DeadlinePassed,
    /// The deadline passed after dispatch.
    #[error("the run's time was over before the tool answered; it may have done its work")]
    DeadlineAfterDispatch,
    /// The server was lost after dispatch.
    #[error("the tool server was lost before it answered; it may have done its work")]
    Lost,
    /// A request was sent, and no answer came.
    #[error("{why}; the request was sent, and may have done its work")]
    Unanswered {
        /// What came instead, scrubbed.
        why: String,
    },
    /// The tool failed.
    #[error("the tool failed")]
    ToolFailed {
        /// Its error as [`tool_error`] shapes it, scrubbed.
        error: Value,
    },
    /// The response is not what the tool's own schema promises.
    #[error("the response is not what the tool's output schema says: {}", violations.join("; "))]
    BadResponse {
        /// The violations, with their places, scrubbed.
        violations: Vec<String>,
    },
    /// The tool answered, and nothing can be made of that.
    #[error("the tool answered, but {0}")]
    Unusable(Unusable),
    /// The journal does not take the intent.
    #[error("the call cannot be recorded, so it was not made: the operator's log says why")]
    NotRecorded,
    /// The response is over the run's limit.
    #[error("the response has {got} bytes, the limit is {limit}")]
    ResponseTooLarge {
        /// Its size.
        got: usize,
        /// The limit.
        limit: u32,
    },
}

impl CallFailure {
    /// What the program sees.
    #[must_use]
    pub fn code(&self) -> CallCode {
        match self {
            Self::NotGranted { .. }
            | Self::DefinitionChanged { .. }
            | Self::NotReviewed(_)
            | Self::OutsideGrant { .. } => CallCode::Denied,
            Self::NoSuchTool(_) => CallCode::NoSuchTool,
            Self::NotAnObject { .. }
            | Self::InexactNumber { .. }
            | Self::BadArguments(_)
            | Self::Unsendable { .. } => CallCode::BadRequest,
            Self::RequestTooLarge { .. } => CallCode::RequestTooLarge,
            Self::ToolFailed { .. } => CallCode::ToolFailed,
            Self::BudgetSpent(_) => CallCode::BudgetSpent,
            Self::DeadlinePassed => CallCode::DeadlinePassed,
            Self::DeadlineAfterDispatch | Self::Lost | Self::Unanswered { .. } => {
                CallCode::OutcomeUnknown
            }
            Self::ResponseTooLarge { .. } => CallCode::ResponseTooLarge,
            Self::BadResponse { .. } | Self::Unusable(_) => CallCode::BadResponse,
            Self::NotRecorded => CallCode::NotRecorded,
        }
    }

    /// The reason as the operator's log may hold it: without anything of the
    /// arguments or of a result.
    #[must_use]
    pub fn logged(&self) -> String {
        match self {
            Self::BadArguments(Violations { places, .. }) if places.is_empty() => {
                "the arguments do not fit the tool's schema".to_owned()
            }
            Self::BadArguments(Violations { places, .. }) => {
                format!("the arguments do not fit the tool's schema at {}", places.join(", "))
            }
            // Why quotes names of members.
            Self::Unsendable { .. } => "the arguments cannot be sent to the tool".to_owned(),
            Self::BadResponse { .. } => {
                "the response is not what the tool's output schema says".to_owned()
            }
            // Why names a host, which the program may have chosen.
            Self::Unanswered { .. } => {
                "a request was sent and not answered; it may have done its work".to_owned()
            }
            Self::OutsideGrant { tool, violation } => {
                let violation = Violation { twin: None, ..violation.clone() };
                Self::OutsideGrant { tool: tool.clone(), violation }.to_string()
            }
            Self::NotGranted { .. }
            | Self::DefinitionChanged { .. }
            | Self::NotReviewed(_)
            | Self::RequestTooLarge { .. }
            | Self::NoSuchTool(_)
            | Self::NotAnObject { .. }
            | Self::InexactNumber { .. }
            | Self::BudgetSpent(_)
            | Self::DeadlinePassed
            | Self::DeadlineAfterDispatch
            | Self::Lost
            | Self::ToolFailed { .. }
            | Self::Unusable(_)
            | Self::NotRecorded
            | Self::ResponseTooLarge { .. } => self.to_string(),
        }
    }

    /// The reason as the program can read it: a JSON object with `error`,
    /// within `bytes_max`; empty if not even a cut reason fits.
    #[must_use]
    pub fn body(&self, bytes_max: usize) -> Vec<u8> {
        let whole = match self {
            Self::ToolFailed { error } => error.clone(),
            Self::OutsideGrant { violation, .. } => {
                json!({ "error": self.to_string(), "constraint": violation.constraint })
            }
            // By its name a program tells it from a tool that is not there.
            Self::NoSuchTool(LookupError::Unavailable { .. } | LookupError::Away(_)) => {
                json!({ "error": self.to_string(), "name": "Unavailable" })
            }
            Self::BadArguments(Violations { texts: violations, .. })
            | Self::BadResponse { violations } => {
                json!({ "error": self.to_string(), "violations": violations })
            }
            Self::Unsendable { why } => json!({ "error": self.to_string(), "violations": [why] }),
            other => json!({ "error": other.to_string() }),
        };
        let body = whole.to_string().into_bytes();
        if body.len() <= bytes_max {
            return body;
        }
        let text = whole.get("error").and_then(Value::as_str).unwrap_or_default();
        // Escapes may double a text; a sixth of the room always suffices.
        for text_bytes in [ERROR_TEXT_BYTES_MAX, bytes_max / 2, bytes_max / 7] {
            let body = json!({ "error": crate::cut(text, text_bytes) }).to_string().into_bytes();
            if body.len() <= bytes_max {
                return body;
            }
        }
        Vec::new()
    }
}

/// A tool's own error as a program sees it, whatever the tool gave: `name`,
/// `message`, `code` and `data`, `null` where the tool says nothing; `error`
/// is the message again, as in every failure. What else the tool gave stays. A name
/// that is the broker's own word does not: the tool may have done its work.
pub(super) fn tool_error(given: Value) -> Value {
    let mut error = match given {
        Value::Object(error) => error,
        other => serde_json::Map::from_iter([("data".to_owned(), other)]),
    };
    let structured = error.get("structuredContent").cloned().unwrap_or(Value::Null);
    let said = |field: &str| {
        error.get(field).or_else(|| structured.get(field)).cloned().filter(|it| !it.is_null())
    };
    let message = said("error").or_else(|| said("message")).unwrap_or_else(|| "".into());
    let name = said("name").filter(|it| !it.as_str().is_some_and(Undone::is_name));
    let name = name.unwrap_or_else(|| "ToolError".into());
    let (code, data) = (said("code").unwrap_or_default(), said("data").unwrap_or_default());
    for (field, value) in
        [("error", message.clone()), ("name", name), ("message", message), ("code", code)]
    {
        error.insert(field.to_owned(), value);
    }
    error.insert("data".to_owned(), data);
    Value::Object(error)
}

/// The error of a tool that surely did nothing, in the same form.
pub(super) fn undone(why: Undone, message: &str) -> Value {
    json!({
        "error": message, "name": why.name(), "message": message, "code": null, "data": null,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::Away;

    #[test]
    fn a_members_name_is_told_to_its_program_and_not_to_the_log() {
        let (constraint, why) = ("/a<=5".to_owned(), crate::constraint::Outside::Twin);
        let violation = Violation { constraint, why, twin: Some("A".to_owned()) };
        let tool = ToolName::parse("shop.order").unwrap();
        let failure = CallFailure::OutsideGrant { tool, violation };
        let told = String::from_utf8(failure.body(1_000)).unwrap();
        assert!(told.contains(r#"leave \"A\" out"#) && told.contains("/a<=5"), "{told}");
        let logged = failure.logged();
        assert!(!logged.contains("leave") && logged.contains("/a<=5"), "{logged}");
    }

    #[test]
    fn a_reason_always_fits_its_bound_and_stays_json() {
        let failure =
            CallFailure::ToolFailed { error: json!({ "error": "\u{1}\"é".repeat(9_999) }) };
        for bytes_max in (0..64).chain([100, 1_000, 10_000, 1_000_000]) {
            let body = failure.body(bytes_max);
            assert!(body.len() <= bytes_max, "{} of {bytes_max}", body.len());
            if !body.is_empty() {
                let body: Value = serde_json::from_slice(&body).unwrap();
                assert!(body["error"].is_string());
            }
        }
        assert!(!failure.body(100).is_empty());
    }

    #[test]
    fn a_program_tells_a_server_that_is_away_from_a_tool_that_is_not_there() {
        let of = |error| {
            let failure = CallFailure::NoSuchTool(error);
            assert_eq!(failure.code(), CallCode::NoSuchTool);
            serde_json::from_slice::<Value>(&failure.body(1_000)).unwrap()
        };
        let away = of(Away { server: "shop".into(), wait_ms: Some(7) }.into());
        assert_eq!(away["name"], "Unavailable");
        assert!(away["error"].as_str().unwrap().contains("in 7 ms"), "{away}");
        let none = of(LookupError::NoTool { tool: "shop.x".into(), closest: None });
        assert_eq!(none.get("name"), None);
    }

    #[test]
    fn a_tools_error_has_name_message_code_and_data_whatever_it_gave() {
        let rpc = tool_error(json!({"error": "no such part", "code": -32602, "data": {"id": 7}}));
        let (name, message) = (json!("ToolError"), json!("no such part"));
        for (field, value) in [
            ("name", &name),
            ("message", &message),
            ("error", &message),
            ("code", &json!(-32602)),
            ("data", &json!({"id": 7})),
        ] {
            assert_eq!(&rpc[field], value, "{field}");
        }
        let own = json!({"name": "OutOfStock", "message": "0 left", "code": 17});
        let told = tool_error(json!({"error": "0 left", "structuredContent": own}));
        assert_eq!((&told["name"], &told["code"]), (&json!("OutOfStock"), &json!(17)));
        assert_eq!(told["data"], Value::Null);
        // That it was not sent is for the broker to say.
        for own in ["Unavailable", "Busy", "Refused"] {
            let told = tool_error(json!({"error": "x", "structuredContent": {"name": own}}));
            assert_eq!(told["name"], name);
            assert_eq!(told["structuredContent"]["name"], own);
        }
        let told = undone(Undone::Busy, "x");
        assert_eq!(tool_error(told)["name"], name);
        let bare = tool_error(json!([1]));
        assert_eq!((&bare["name"], &bare["data"]), (&name, &json!([1])));
    }
}
