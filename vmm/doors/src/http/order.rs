//! Runs as they are asked for: JSON or multipart in, an [`Order`] out.
//!
//! The link to the service is shared by everybody at this door, and the
//! service closes it over a message that is larger than it may be. So every
//! part of an order is held against its own bound here.

use std::fmt;
use std::marker::PhantomData;

use axum::body::Body;
use axum::extract::multipart::MultipartError;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Multipart, Request};
use axum::http::{HeaderMap, StatusCode, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::broker::{Authority, HostedTool, HostedTools};
use forge_protocol::limits::{
    GRANT_BYTES_MAX, GRANTED_TOOLS_MAX, HOSTED_TOOLS_BYTES_MAX, INPUT_BYTES_MAX, PROGRAM_BYTES_MAX,
    RunLimits, SESSION_BYTES_MAX,
};
use forge_protocol::name::ToolName;
use forge_protocol::service::Order;
use serde::de::{DeserializeOwned, Error as _, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::problem::Problem;
use crate::integer;
use crate::object::Object;
use crate::web;

/// A body that asks for a run: JSON with its program in base64 is the longest.
pub(crate) const RUN_BYTES_MAX: usize = (PROGRAM_BYTES_MAX as usize + GRANT_BYTES_MAX as usize) / 3
    * 4
    + INPUT_BYTES_MAX as usize
    + 256 * 1024;
/// The same over a WebSocket, with the tools that the client hosts.
pub(crate) const MESSAGE_BYTES_MAX: usize = RUN_BYTES_MAX + 2 * HOSTED_TOOLS_BYTES_MAX as usize;

/// Tools, no more than a grant has: a longer list is refused where it is too long, and
/// nothing of it is kept.
#[derive(Debug, Default)]
pub(crate) struct Tools<T>(pub(crate) Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Tools<T> {
    fn deserialize<D: Deserializer<'de>>(list: D) -> Result<Self, D::Error> {
        struct Bounded<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
            type Value = Tools<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of tools")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Tools<T>, A::Error> {
                let mut tools = Vec::new();
                while let Some(tool) = list.next_element()? {
                    if tools.len() == GRANTED_TOOLS_MAX {
                        let what = format!("there are more than {GRANTED_TOOLS_MAX} tools");
                        return Err(A::Error::custom(what));
                    }
                    tools.push(tool);
                }
                Ok(Tools(tools))
            }
        }
        list.deserialize_seq(Bounded(PhantomData))
    }
}

/// A run, in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunBody {
    program: String,
    #[serde(default)]
    grant: Option<String>,
    #[serde(default, deserialize_with = "present")]
    input: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "or_default")]
    limits: Object<Limits>,
    #[serde(default)]
    tools: Option<Tools<String>>,
    #[serde(default)]
    session: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    prepare: bool,
    #[serde(default)]
    principal: Option<String>,
    #[serde(default)]
    wait: Option<bool>,
}

/// What a multipart form says beside its files.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    #[serde(default)]
    tools: Option<Tools<String>>,
    #[serde(default)]
    session: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    prepare: bool,
    #[serde(default)]
    principal: Option<String>,
    #[serde(default)]
    wait: Option<bool>,
}

macro_rules! limits {
    ($($name:ident: $type:ty),* $(,)?) => {
        /// What a run may use, where it is not what every run gets.
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct Limits {
            $(#[serde(default, deserialize_with = "integer::optional")] $name: Option<$type>,)*
        }

        impl From<Limits> for RunLimits {
            fn from(asked: Limits) -> Self {
                let default = Self::default();
                Self { $($name: asked.$name.unwrap_or(default.$name),)* }
            }
        }

        #[cfg(test)]
        pub(crate) const LIMITS: &[&str] = &[$(stringify!($name)),*];
    };
}

limits! {
    fuel: u64,
    memory_bytes: u64,
    wall_ms: u64,
    program_bytes: u32,
    input_bytes: u32,
    request_bytes: u32,
    response_bytes: u32,
    output_bytes: u32,
    artifacts: u32,
    artifact_bytes: u32,
    log_bytes: u32,
    calls: u32,
    calls_in_flight: u32,
    recursion: u32,
    stack_bytes: u32,
}

/// Tools that a client hosts, in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostedBody {
    server: String,
    tools: Tools<Object<HostedToolBody>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostedToolBody {
    name: String,
    #[serde(default, deserialize_with = "or_default")]
    description: String,
    input_schema: Box<RawValue>,
    #[serde(default)]
    output_schema: Option<Box<RawValue>>,
}

/// The parts of an order, whichever way they came.
struct Parts {
    program: Vec<u8>,
    input: Vec<u8>,
    grant: Option<Vec<u8>>,
    limits: Limits,
    options: Options,
}

/// A run that is asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) order: Order,
    /// Whether the answer is awaited.
    pub(crate) wait: bool,
}

/// Reads a body that asks for a run. `read` has read it already.
pub(crate) async fn read(
    headers: &HeaderMap,
    body: Vec<u8>,
    principal: &str,
) -> Result<Asked, Problem> {
    match media_type(headers).as_str() {
        "application/json" => from_json(&body, principal),
        "multipart/form-data" => from_multipart(headers, body, principal).await,
        _ => Err(unsupported("application/json or multipart/form-data")),
    }
}

pub(crate) fn unsupported(fitting: &str) -> Problem {
    Problem::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "media_type",
        format!("send {fitting}, and no Content-Encoding"),
    )
}

/// The media type of a request's body, in lower case, without parameters; none
/// of one that is encoded beside that.
pub(crate) fn media_type(headers: &HeaderMap) -> String {
    if !web::guard::is_plain(headers) {
        return String::new();
    }
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    value.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Reads JSON: 400 for what is none, 422 for what does not fit.
pub(crate) fn json<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, Problem> {
    // What is skipped is not looked at as text.
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Problem::new(StatusCode::BAD_REQUEST, "bad_request", format!("{what}: {error}"))
    })?;
    serde_json::from_str(text).map_err(|error| {
        let detail = format!("{what}: {error}");
        match error.classify() {
            serde_json::error::Category::Data => Problem::bad_request(detail),
            _ => Problem::new(StatusCode::BAD_REQUEST, "bad_request", detail),
        }
    })
}

/// The same, of an object.
pub(crate) fn object<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, Problem> {
    json(what, bytes).map(|Object(read)| read)
}

/// A field that is there, though it is `null`: that is a value as any other.
/// Where it is none, it is refused, which a missing field is not.
pub(crate) fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    field: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(field).map(Some)
}

/// A field that may as well be `null` as left out.
pub(crate) fn or_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(
    field: D,
) -> Result<T, D::Error> {
    Option::<T>::deserialize(field).map(Option::unwrap_or_default)
}

fn from_json(body: &[u8], principal: &str) -> Result<Asked, Problem> {
    object::<RunBody>("the body", body)?.asked(principal, None)
}

impl RunBody {
    /// What it asks for, for this principal.
    pub(crate) fn asked(
        self,
        principal: &str,
        hosted: Option<HostedBody>,
    ) -> Result<Asked, Problem> {
        let input = self.input.map_or_else(
            || b"{}".to_vec(),
            |input| String::from(Box::<str>::from(input)).into_bytes(),
        );
        let parts = Parts {
            program: base64("program", &self.program, PROGRAM_BYTES_MAX)?,
            input,
            grant: self.grant.map(|grant| base64("grant", &grant, GRANT_BYTES_MAX)).transpose()?,
            limits: self.limits.0,
            options: Options {
                tools: self.tools,
                session: self.session,
                prepare: self.prepare,
                principal: self.principal,
                wait: self.wait,
            },
        };
        parts.asked(principal, hosted)
    }

    /// Whether it says anything about waiting.
    pub(crate) fn says_wait(&self) -> bool {
        self.wait.is_some()
    }
}

async fn from_multipart(
    headers: &HeaderMap,
    body: Vec<u8>,
    principal: &str,
) -> Result<Asked, Problem> {
    let broken = |error: &dyn std::fmt::Display| {
        Problem::new(StatusCode::BAD_REQUEST, "bad_request", format!("the form: {error}"))
    };
    let mut request = Request::new(Body::from(body));
    if let Some(value) = headers.get(header::CONTENT_TYPE) {
        request.headers_mut().insert(header::CONTENT_TYPE, value.clone());
    }
    // It was read within a bound already.
    DefaultBodyLimit::disable().apply(&mut request);
    let form = Multipart::from_request(request, &()).await;
    let mut form = form.map_err(|error| broken(&error.body_text()))?;
    let names = ["program", "input", "grant", "limits", "options"];
    let mut found: [Option<Vec<u8>>; 5] = Default::default();
    // What it shows is that there is an error.
    let broken_off = |error: MultipartError| broken(&error.body_text());
    while let Some(field) = form.next_field().await.map_err(broken_off)? {
        let name = field.name().unwrap_or_default();
        let Some(at) = names.iter().position(|it| *it == name) else {
            let what = "a part that is none of program, input, grant, limits, options";
            return Err(Problem::bad_request(what));
        };
        let slot = &mut found[at];
        if slot.is_some() {
            return Err(Problem::bad_request(format!("the part {} is there twice", names[at])));
        }
        *slot = Some(field.bytes().await.map_err(broken_off)?.into());
    }
    let [program, input, grant, limits, options] = found;
    let program = program.ok_or_else(|| Problem::bad_request("the part program is missing"))?;
    let input = input.unwrap_or_else(|| b"{}".to_vec());
    let limits = limits.map_or_else(|| Ok(Limits::default()), |it| object("limits", &it))?;
    let options = options.map_or_else(|| Ok(Options::default()), |it| object("options", &it))?;
    Parts { program, input, grant, limits, options }.asked(principal, None)
}

impl Parts {
    fn asked(self, principal: &str, hosted: Option<HostedBody>) -> Result<Asked, Problem> {
        let Self { program, input, grant, limits, options } = self;
        check_principal(principal, options.principal.as_deref())?;
        bounded("program", program.len(), PROGRAM_BYTES_MAX as usize)?;
        bounded("input", input.len(), INPUT_BYTES_MAX as usize)?;
        json::<IgnoredAny>("input", &input)?;
        check_session(options.session.as_deref())?;
        let authority = match (grant, options.tools) {
            (Some(_), Some(_)) => {
                return Err(Problem::bad_request("give a grant or tools, not both"));
            }
            (Some(grant), None) => {
                bounded("grant", grant.len(), GRANT_BYTES_MAX as usize)?;
                Authority::Grant(grant)
            }
            (None, names) => Authority::Tools(tools(&names.unwrap_or_default().0)?),
        };
        let order = Order {
            program,
            input,
            principal: principal.into(),
            session: options.session,
            authority,
            limits: limits.into(),
            prepare: options.prepare,
            events: false,
            hosted: hosted.map(hosted_tools).transpose()?,
        };
        Ok(Asked { order, wait: options.wait.unwrap_or(true) })
    }
}

/// Refuses a body that says it is somebody else's.
pub(crate) fn check_principal(own: &str, named: Option<&str>) -> Result<(), Problem> {
    match named {
        Some(named) if named != own => Err(Problem::forbidden(
            "this token does not speak for the principal that the body names",
        )),
        _ => Ok(()),
    }
}

pub(crate) fn check_session(session: Option<&str>) -> Result<(), Problem> {
    bounded("session", session.map_or(0, str::len), SESSION_BYTES_MAX)
}

/// Refuses what is longer than it may be.
pub(crate) fn bounded(what: &str, got: usize, limit: usize) -> Result<(), Problem> {
    if got > limit {
        return Err(Problem::too_large(format!("{what} has {got} bytes, the limit is {limit}")));
    }
    Ok(())
}

/// Reads base64, of at most so many bytes.
pub(crate) fn base64(what: &str, text: &str, limit: u32) -> Result<Vec<u8>, Problem> {
    let too_large = || Problem::too_large(format!("{what} has more than {limit} bytes"));
    // Whatever is longer decodes to more.
    let longest = limit.div_ceil(3) as usize * 4;
    if text.len() > longest {
        return Err(too_large());
    }
    let no_base64 = |error| Problem::bad_request(format!("{what} is no base64: {error}"));
    let bytes = STANDARD.decode(text).map_err(no_base64)?;
    if bytes.len() > limit as usize { Err(too_large()) } else { Ok(bytes) }
}

/// Reads names of tools.
pub(crate) fn tools(names: &[String]) -> Result<Vec<ToolName>, Problem> {
    let name = |name: &String| {
        ToolName::parse(name).map_err(|error| Problem::bad_request(format!("tools: {error}")))
    };
    names.iter().map(name).collect()
}

fn hosted_tools(hosted: HostedBody) -> Result<HostedTools, Problem> {
    let text = |schema: Box<RawValue>| String::from(Box::<str>::from(schema));
    let tools: Vec<HostedTool> = hosted
        .tools
        .0
        .into_iter()
        .map(|Object(tool)| HostedTool {
            name: tool.name,
            description: tool.description,
            input_schema: text(tool.input_schema),
            output_schema: tool.output_schema.map(text),
        })
        .collect();
    // Each text has its length beside it on the wire.
    let bytes = |tool: &HostedTool| {
        let output = tool.output_schema.as_ref().map_or(0, String::len);
        tool.name.len() + tool.description.len() + tool.input_schema.len() + output + 32
    };
    let all = hosted.server.len() + tools.iter().map(bytes).sum::<usize>();
    bounded("hosted", all, HOSTED_TOOLS_BYTES_MAX as usize)?;
    Ok(HostedTools { server: hosted.server, tools })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(body: &str) -> Result<Asked, Problem> {
        from_json(body.as_bytes(), "alice")
    }

    fn refusal(body: &str) -> (u16, String) {
        let problem = asked(body).unwrap_err();
        (problem.body().status(), problem.body().kind().to_owned())
    }

    #[test]
    fn a_run_is_its_tokens_and_gets_what_it_asks_for() {
        let asked = asked(
            r#"{"program": "AAEC", "input": {"a": 1.00, "a": 2}, "tools": ["shop.order"],
                "limits": {"wall_ms": 7}, "session": "s", "wait": false, "principal": "alice"}"#,
        )
        .unwrap();
        let Order { program, input, principal, session, authority, limits, .. } = asked.order;
        assert_eq!(program, [0, 1, 2]);
        // As it was written.
        assert_eq!(input, br#"{"a": 1.00, "a": 2}"#);
        assert_eq!((principal.as_str(), session.as_deref()), ("alice", Some("s")));
        assert_eq!(authority, Authority::Tools(vec![ToolName::parse("shop.order").unwrap()]));
        assert_eq!(limits, RunLimits { wall_ms: 7, ..RunLimits::default() });
        assert!(!asked.wait);
    }

    #[test]
    fn json_that_serde_json_would_read_anew_goes_on_as_it_came() {
        let raw = r#"{"$serde_json::private::RawValue": "[1]"}"#;
        let asked = asked(&format!(r#"{{"program": "", "input": {raw}}}"#)).unwrap();
        assert_eq!(asked.order.input, raw.as_bytes());
    }

    #[test]
    fn a_body_that_names_another_principal_is_refused() {
        let refused = refusal(r#"{"program": "", "principal": "bob"}"#);
        assert_eq!(refused, (403, "forbidden".into()));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_its_kind() {
        for (body, status) in [
            ("", 400),
            ("{", 400),
            ("[]", 422),
            (r#"["AAEC"]"#, 422),
            (r#"{"program": "", "limits": [1]}"#, 422),
            (r#"{"program": ""} {}"#, 400),
            ("{}", 422),
            (r#"{"program": "*"}"#, 422),
            (r#"{"program": "", "unknown": 1}"#, 422),
            (r#"{"program": "", "limits": {"wal_ms": 1}}"#, 422),
            (r#"{"program": "", "limits": {"wall_ms": -1}}"#, 422),
            (r#"{"program": "", "tools": ["x"]}"#, 422),
            (r#"{"program": "", "tools": [], "grant": ""}"#, 422),
        ] {
            assert_eq!(refusal(body), (status, "bad_request".into()), "{body}");
        }
    }

    #[tokio::test]
    async fn a_form_that_is_broken_is_told_how() {
        let told = async |boundary: &str, body: &str| {
            let mut headers = HeaderMap::new();
            let kind = format!("multipart/form-data; boundary={boundary}");
            headers.insert(header::CONTENT_TYPE, kind.parse().unwrap());
            let read = from_multipart(&headers, body.into(), "alice").await;
            serde_json::to_string(&read.unwrap_err().body()).unwrap()
        };
        let part = "--x\r\nContent-Disposition: form-data; name=\"program\"\r\n\r\nabc";
        for (boundary, body) in [("x", part.to_owned()), ("y", format!("{part}\r\n--x--\r\n"))] {
            let said = told(boundary, &body).await;
            assert!(said.contains("incomplete"), "{said}");
        }
    }

    #[test]
    fn null_is_an_input_and_no_input_is_an_object() {
        let input = |body: &str| from_json(body.as_bytes(), "alice").unwrap().order.input;
        assert_eq!(input(r#"{"program": "", "input": null}"#), b"null");
        assert_eq!(input(r#"{"program": ""}"#), b"{}");
    }

    #[test]
    fn what_is_too_large_for_the_link_is_refused_here() {
        let program = "A".repeat((PROGRAM_BYTES_MAX as usize).div_ceil(3) * 4 + 4);
        let grant = STANDARD.encode(vec![0; GRANT_BYTES_MAX as usize + 1]);
        let input = "1".repeat(INPUT_BYTES_MAX as usize + 1);
        let session = "s".repeat(SESSION_BYTES_MAX + 1);
        for body in [
            format!(r#"{{"program": "{program}"}}"#),
            format!(r#"{{"program": "", "grant": "{grant}"}}"#),
            format!(r#"{{"program": "", "input": "{input}"}}"#),
            format!(r#"{{"program": "", "session": "{session}"}}"#),
        ] {
            assert_eq!(refusal(&body), (413, "too_large".into()), "{}", &body[..40]);
        }
        let tools = vec!["a.b"; GRANTED_TOOLS_MAX + 1];
        let body = serde_json::json!({ "program": "", "tools": tools }).to_string();
        assert_eq!(refusal(&body), (422, "bad_request".into()));
        // It ends where it is too long: what follows is not read, or it would be no JSON.
        let cut = &body[..body.len() - 1];
        let problem = asked(&cut.replace(']', ", 7, [")).unwrap_err();
        let told = serde_json::to_string(&problem.body()).unwrap();
        assert!(told.contains("more than 256 tools"), "{told}");
        let hosted = |tools: &str| format!(r#"{{"server": "app", "tools": [{tools}]}}"#);
        let tool = r#"{"name": "t", "input_schema": {}},"#.repeat(GRANTED_TOOLS_MAX);
        let most = hosted(tool.trim_end_matches(','));
        serde_json::from_str::<HostedBody>(&most).unwrap();
        let beyond = hosted(&format!("{tool}{}", &tool[..tool.find("},").unwrap() + 1]));
        let told = serde_json::from_str::<HostedBody>(&beyond).unwrap_err().to_string();
        assert!(told.contains("more than 256 tools"), "{told}");

        let description = "d".repeat(HOSTED_TOOLS_BYTES_MAX as usize);
        let hosted = serde_json::json!({ "server": "app", "tools": [
            { "name": "t", "description": description, "input_schema": {} },
        ]});
        let hosted: HostedBody = serde_json::from_value(hosted).unwrap();
        assert_eq!(hosted_tools(hosted).unwrap_err().body().status(), 413);
    }

    #[test]
    fn the_largest_order_fits_the_link() {
        use forge_protocol::frame::{self, Kind};
        use forge_protocol::limits::TOOL_NAME_BYTES_MAX;
        let server = "s".repeat(TOOL_NAME_BYTES_MAX / 2);
        let tools = (0..GRANTED_TOOLS_MAX).map(|number| {
            let name = format!("{server}.{number:0>0$}", TOOL_NAME_BYTES_MAX - 1 - server.len());
            ToolName::parse(&name).unwrap()
        });
        let hosted = HostedBody {
            server: "app".into(),
            tools: Tools(vec![Object(HostedToolBody {
                name: "t".into(),
                description: "d".repeat(HOSTED_TOOLS_BYTES_MAX as usize - 100),
                input_schema: RawValue::from_string("{}".into()).unwrap(),
                output_schema: None,
            })]),
        };
        let order = Order {
            program: vec![0; PROGRAM_BYTES_MAX as usize],
            input: vec![b'1'; INPUT_BYTES_MAX as usize],
            principal: "p".repeat(256),
            session: Some("s".repeat(SESSION_BYTES_MAX)),
            authority: Authority::Tools(tools.collect()),
            limits: RunLimits::operator_maxima(),
            prepare: true,
            events: true,
            hosted: Some(hosted_tools(hosted).unwrap()),
        };
        let mut bytes = Vec::new();
        frame::write_message(Kind::Submit, &(u64::MAX, &order), &mut bytes);
        assert!(bytes.len() <= Kind::Submit.payload_bytes_max() as usize);
    }
}
