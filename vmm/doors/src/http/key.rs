//! A key of the client's on a submission (`Idempotency-Key`): what is submitted again
//! under it is the same run, so that a client whose answer was lost may ask once more.

use axum::http::{HeaderMap, StatusCode};
use forge_protocol::codec;
use forge_protocol::service::Order;
use sha2::{Digest as _, Sha256};

use super::problem::Problem;

/// The header's name.
const HEADER: &str = "idempotency-key";
/// A key, in bytes.
const KEY_BYTES_MAX: usize = 255;

/// A submission and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keyed {
    pub(crate) key: String,
    /// Of all that is asked for: a form is written with another boundary each time.
    pub(crate) order_sha256: [u8; 32],
}

impl Keyed {
    /// The key that this order is submitted under, if it is under one.
    pub(crate) fn read(headers: &HeaderMap, order: &Order) -> Result<Option<Self>, Problem> {
        let mut keys = headers.get_all(HEADER).iter();
        let Some(key) = keys.next() else { return Ok(None) };
        let key = key.to_str().ok().filter(|key| (1..=KEY_BYTES_MAX).contains(&key.len()));
        let (Some(key), None) = (key, keys.next()) else {
            return Err(Problem::bad_request(format!(
                "Idempotency-Key is given once, as 1 to {KEY_BYTES_MAX} printable characters of \
                 ASCII"
            )));
        };
        let mut bytes = Vec::new();
        codec::encode_into(order, &mut bytes);
        Ok(Some(Self { key: key.to_owned(), order_sha256: Sha256::digest(&bytes).into() }))
    }
}

/// The key is another submission's.
pub(crate) fn reused() -> Problem {
    let detail = "this Idempotency-Key was used for another run: draw a new one for each run";
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "key_reused", detail)
}

/// It is not known yet whether the run begins.
pub(crate) fn in_progress() -> Problem {
    let detail = "a submission with this Idempotency-Key is being admitted: ask again";
    Problem::new(StatusCode::CONFLICT, "in_progress", detail)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use forge_protocol::broker::Authority;
    use forge_protocol::limits::RunLimits;

    use super::*;

    pub(crate) fn order(input: &str) -> Order {
        Order {
            program: Vec::new(),
            input: input.as_bytes().to_vec(),
            principal: "a".into(),
            session: None,
            authority: Authority::Tools(Vec::new()),
            limits: RunLimits::default(),
            prepare: false,
            events: false,
            hosted: None,
        }
    }

    #[test]
    fn a_key_is_one_printable_text_and_stands_for_what_is_asked() {
        let read = |keys: &[&str], input| {
            let mut headers = HeaderMap::new();
            for key in keys {
                headers.append(HEADER, HeaderValue::from_bytes(key.as_bytes()).unwrap());
            }
            Keyed::read(&headers, &order(input))
        };
        assert_eq!(read(&[], "1").unwrap(), None);
        let one = read(&["k"], "1").unwrap().unwrap();
        assert_eq!(read(&["k"], "1").unwrap().unwrap(), one);
        assert_ne!(read(&["k"], "2").unwrap().unwrap().order_sha256, one.order_sha256);
        for wrong in [&[""][..], &["ü"], &["k", "k"], &[&"k".repeat(256)]] {
            assert_eq!(read(wrong, "1").unwrap_err().body().status(), 422, "{wrong:?}");
        }
    }
}
