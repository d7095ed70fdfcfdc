//! `[builtins.http]`: where `http.fetch` may go.

use std::time::Duration;

use hyper::header::HeaderName;
use url::{Host, Url};

use super::builtins::CONTENT_BYTES;
use super::certificates::ca_file;
use super::credentials::credential;
use super::node::{ITEMS_MAX, Node};
use super::{ConfigError, Lookup};
use crate::egress::address::AddressRange;
use crate::egress::rule::{
    Method, OperatorHeader, Rule, Scheme, is_plain_path, operator_may_send, program_might_see,
    program_might_send,
};
use crate::egress::{Policy, tls};

/// `[builtins.http]`.
pub(super) fn parse(table: &Node<'_>, lookup: Lookup<'_>) -> Result<Policy, ConfigError> {
    table.only(&["allow", "response_bytes_max", "timeout_ms", "ca_file"])?;
    let rules = table
        .needed("allow")?
        .some_items()?
        .iter()
        .map(|entry| rule(entry, lookup))
        .collect::<Result<Vec<Rule>, _>>()?;
    let tls = tls(ca_file(table)?)
        .map_err(|error| table.unfit(format!("this host's certificate store: {error}")))?;
    Ok(Policy {
        rules,
        response_bytes_max: table.number_in("response_bytes_max", CONTENT_BYTES, 1024 * 1024)?
            as usize,
        time_max: Duration::from_millis(table.number_in("timeout_ms", 1..=600_000, 30_000)?),
        tls,
    })
}

fn rule(entry: &Node<'_>, lookup: Lookup<'_>) -> Result<Rule, ConfigError> {
    entry.only(&[
        "scheme",
        "host",
        "port",
        "methods",
        "path_prefix",
        "addresses",
        "headers",
        "request_headers",
        "response_headers",
    ])?;
    let scheme = match entry.field("scheme") {
        Some(node) => {
            Scheme::parse(node.text()?).ok_or_else(|| node.unfit("must be https or http"))?
        }
        None => Scheme::Https,
    };
    let host = host(&entry.needed("host")?)?;
    let port = entry.number_in("port", 1..=65_535, scheme.port().into())? as u16;
    let methods = match entry.field("methods") {
        Some(methods) => methods
            .some_items()?
            .iter()
            .map(|node| {
                Method::parse(node.text()?).ok_or_else(|| {
                    let all = Method::ALL.map(Method::as_str).join(", ");
                    node.unfit(format!("must be one of {all}"))
                })
            })
            .collect::<Result<_, _>>()?,
        None => vec![Method::Get],
    };
    let path_prefix = match entry.field("path_prefix") {
        Some(node) => path_prefix(&node)?,
        None => "/".to_owned(),
    };
    let addresses = match entry.field("addresses") {
        Some(ranges) => ranges
            .some_items()?
            .iter()
            .map(|node| {
                AddressRange::parse(node.text()?).ok_or_else(|| {
                    let why = "must be a range of addresses such as 10.1.0.0/16, with nothing set \
                               behind its prefix";
                    node.unfit(why)
                })
            })
            .collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    let headers = match entry.field("headers") {
        Some(headers) => operator_headers(&headers, lookup)?,
        None => Vec::new(),
    };
    let names = |key: &str, allowed: fn(&HeaderName) -> bool| match entry.field(key) {
        Some(names) => names_of(&names, allowed),
        None => Ok(Vec::new()),
    };
    Ok(Rule {
        scheme,
        host,
        port,
        methods,
        path_prefix,
        addresses,
        headers,
        request_headers: names("request_headers", program_might_send)?,
        response_headers: names("response_headers", program_might_see)?,
    })
}

/// A host as the parser of URLs has it, so that it is compared with what that
/// makes of a program's.
fn host(node: &Node<'_>) -> Result<Host, ConfigError> {
    let text = node.text()?;
    let why = "must be a host's name or address alone, as api.example.com: the scheme, the port \
               and the path have keys of their own, no * stands for several names, and an IPv6 \
               address stands in brackets";
    let host = Host::parse(text).map_err(|_| node.unfit(why))?;
    let in_url = Url::parse(&format!("https://{text}/")).ok();
    let is_same =
        in_url.and_then(|url| url.host().map(|host| host.to_owned())) == Some(host.clone());
    // A pattern would be taken for a name that nothing has.
    let is_odd = match &host {
        Host::Domain(name) => name.ends_with('.') || name.contains('*'),
        // `1.2.3` is another address than it looks like.
        Host::Ipv4(address) => address.to_string() != text,
        Host::Ipv6(_) => false,
    };
    if !is_same || is_odd {
        return Err(node.unfit(why));
    }
    Ok(host)
}

fn path_prefix(node: &Node<'_>) -> Result<String, ConfigError> {
    let text = node.text()?;
    let url = Url::parse(&format!("https://host{text}")).ok();
    let is_itself = url.is_some_and(|url| url.path() == text && url[..].ends_with(text));
    if !text.starts_with('/') || !is_itself || !is_plain_path(text) {
        let why = "must begin with / and be written as it stands in a URL, without dot segments, \
                   query and fragment";
        return Err(node.unfit(why));
    }
    Ok(text.to_owned())
}

/// What is wrong with one of two headers of one name.
pub(super) const TWICE: &str = "this header stands here twice: keep one";

/// Names to values, or to where the value comes from.
fn operator_headers(
    table: &Node<'_>,
    lookup: Lookup<'_>,
) -> Result<Vec<OperatorHeader>, ConfigError> {
    let children = table.children()?;
    if children.len() > ITEMS_MAX {
        return Err(table.too_many());
    }
    let mut headers: Vec<OperatorHeader> = Vec::new();
    for (key, node) in children {
        let name = header_name(key, &node, operator_may_send)?;
        if headers.iter().any(|header| header.name == name) {
            return Err(node.unfit(TWICE));
        }
        let header = match node.object() {
            Err(_) => {
                let value = node.secret(node.text()?.to_owned())?;
                OperatorHeader { name, prefix: String::new(), value, is_credential: false }
            }
            Ok(_) => {
                let prefix = match node.field("prefix") {
                    Some(prefix) => prefix.text()?.to_owned(),
                    None => String::new(),
                };
                let value = credential(&node, &["prefix"], lookup)?;
                OperatorHeader { name, prefix, value, is_credential: true }
            }
        };
        if header.whole().is_none() {
            return Err(node.unfit("its value has characters that no header can carry"));
        }
        headers.push(header);
    }
    Ok(headers)
}

fn names_of(
    node: &Node<'_>,
    allowed: fn(&HeaderName) -> bool,
) -> Result<Vec<HeaderName>, ConfigError> {
    node.some_items()?.iter().map(|item| header_name(item.text()?, item, allowed)).collect()
}

fn header_name(
    text: &str,
    node: &Node<'_>,
    allowed: fn(&HeaderName) -> bool,
) -> Result<HeaderName, ConfigError> {
    let name = HeaderName::from_bytes(text.as_bytes())
        .map_err(|_| node.unfit("is no name of a header"))?;
    if allowed(&name) {
        return Ok(name);
    }
    let why = "this header may not be configured here: it frames or routes the message, or \
               carries a credential";
    Err(node.unfit(why))
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    fn environment(name: &str) -> Option<String> {
        match name {
            "TOKEN" => Some("hunter2-token".into()),
            "LINES" => Some("hunter2\nx: y".into()),
            _ => None,
        }
    }

    fn load(rule: &str, more: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("forge.toml");
        std::fs::write(&file, format!("[builtins.http]\nallow = [{{ {rule} }}]\n{more}")).unwrap();
        Config::load(None, Some(&file), &environment).map_err(|error| error.to_string())
    }

    #[test]
    fn a_rule_says_as_little_as_it_can_and_gets_the_safe_defaults() {
        let policy = load("host = 'API.example.com'", "").unwrap().builtins.http.unwrap();
        assert_eq!(policy.rules[0].to_string(), "GET https://api.example.com/");
        assert!(policy.rules[0].addresses.is_empty());
        let rule = "scheme = 'http', host = '[::1]', port = 8080, methods = ['GET', 'POST'], \
                    path_prefix = '/v1/', addresses = ['::1', '127.0.0.0/8'], headers = { \
                    Authorization = { prefix = 'Bearer ', from_env = 'TOKEN' }, X-A = 'b' }, \
                    request_headers = ['Idempotency-Key'], response_headers = ['X-Request-Id']";
        let policy = load(rule, "timeout_ms = 5").unwrap().builtins.http.unwrap();
        let rule = &policy.rules[0];
        assert_eq!(rule.to_string(), "GET/POST http://[::1]:8080/v1/");
        let header = rule.headers.iter().find(|header| header.name == "authorization").unwrap();
        assert_eq!(header.whole().unwrap().to_str().unwrap(), "Bearer hunter2-token");
        assert!(header.is_credential);
        assert!(!format!("{policy:?}").contains("hunter2"), "{policy:?}");
    }

    #[test]
    fn a_host_that_nothing_can_match_is_refused_with_what_to_write() {
        for host in ["https://hunter2", "hunter2:80", "hunter2/", "*.hunter2", "hunter2.*"] {
            let refused = load(&format!("host = '{host}'"), "").unwrap_err();
            for said in ["allow.0.host: ", "alone, as api.example.com", "no * stands for several"] {
                assert!(refused.contains(said), "{refused}");
            }
        }
    }

    #[test]
    fn every_refusal_names_the_field_and_never_a_value() {
        for (rule, more, expected) in [
            ("", "", "allow.0.host: this field is missing"),
            ("host = 'https://hunter2'", "", "allow.0.host: must be"),
            ("host = 'hunter2:80'", "", "allow.0.host: must be"),
            ("host = 'hunter2/'", "", "allow.0.host: must be"),
            ("host = 'a@hunter2'", "", "allow.0.host: must be"),
            ("host = 'hunter2.'", "", "allow.0.host: must be"),
            ("host = '*.hunter2'", "", "allow.0.host: must be"),
            ("host = '::1'", "", "allow.0.host: must be"),
            // Other addresses than they look like.
            ("host = '10.1'", "", "allow.0.host: must be"),
            ("host = '010.0.0.1'", "", "allow.0.host: must be"),
            ("host = '0x7f000001'", "", "allow.0.host: must be"),
            ("host = 'h', scheme = 'hunter2'", "", "allow.0.scheme: must be"),
            ("host = 'h', port = 0", "", "allow.0.port: must be from 1"),
            ("host = 'h', methods = []", "", "allow.0.methods: is empty"),
            ("host = 'h', methods = ['get']", "", "allow.0.methods.0: must be one of"),
            ("host = 'h', methods = ['CONNECT']", "", "allow.0.methods.0: must be one of"),
            ("host = 'h', path_prefix = 'hunter2'", "", "allow.0.path_prefix"),
            ("host = 'h', path_prefix = '/../'", "", "allow.0.path_prefix"),
            ("host = 'h', path_prefix = '/%2e%2e/'", "", "allow.0.path_prefix"),
            ("host = 'h', path_prefix = '/a%2fb'", "", "allow.0.path_prefix"),
            ("host = 'h', path_prefix = '/a/%252e%252e/'", "", "allow.0.path_prefix"),
            ("host = 'h', path_prefix = '/a?b'", "", "allow.0.path_prefix"),
            ("host = 'h', path_prefix = '/a b'", "", "allow.0.path_prefix"),
            ("host = 'h', addresses = ['hunter2']", "", "allow.0.addresses.0"),
            ("host = 'h', addresses = ['10.0.0.1/8']", "", "allow.0.addresses.0"),
            ("host = 'h', headers = { Host = 'hunter2' }", "", "allow.0.headers.Host"),
            (
                "host = 'h', headers = { A = { from_env = 'LINES' } }",
                "",
                "allow.0.headers.A: its value has characters",
            ),
            ("host = 'h', headers = { A = { value = 'hunter2' } }", "", "allow.0.headers.A.value"),
            (
                "host = 'h', headers = { A = { prefix = 'x', value = 'hunter2' } }",
                "",
                "known here are from_env, file, age, identity, command, prefix",
            ),
            ("host = 'h', headers = { A = { prefix = 'hunter2' } }", "", "exactly one source"),
            ("host = 'h', headers = { A = 'a', a = 'hunter2' }", "", "twice"),
            ("host = 'h', request_headers = ['Authorization']", "", "allow.0.request_headers.0"),
            (
                "host = 'h', request_headers = ['X-HTTP-Method-Override']",
                "",
                "allow.0.request_headers.0",
            ),
            ("host = 'h', response_headers = ['Set-Cookie']", "", "allow.0.response_headers.0"),
            ("host = 'h', proxy = 'hunter2'", "", "allow.0.proxy: unknown field"),
            ("host = 'h'", "response_bytes_max = 0", "http.response_bytes_max: must be from 1"),
            ("host = 'h'", "timeout_ms = 'hunter2'", "http.timeout_ms: expected"),
            ("host = 'h'", "ca_file = '/hunter2'", "http.ca_file: cannot be read"),
        ] {
            let refused = match load(rule, more) {
                Ok(_) => panic!("accepted: {rule} {more}"),
                Err(refused) => refused,
            };
            assert!(refused.contains(expected), "{rule} {more}\n→ {refused}");
            assert!(!refused.contains("hunter2"), "{rule} {more}\n→ {refused}");
        }
    }
}
