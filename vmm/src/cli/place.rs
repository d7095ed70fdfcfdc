//! Where a service is that a command is to reach.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use forge_client::ClientError;
use forge_client::blocking::Client;

/// What makes it an address and no path: `./vsock:2:5000` is a file.
pub(super) const VSOCK: &str = "vsock:";

/// A socket's path, or `vsock:CID:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A unix socket.
    Path(PathBuf),
    /// A port of another machine, or of the host.
    Vsock { cid: u32, port: u32 },
}

impl FromStr for Place {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some(address) = text.strip_prefix(VSOCK) else { return Ok(Self::Path(text.into())) };
        let (cid, port) = address.split_once(':').unwrap_or_default();
        match (cid.parse(), port.parse()) {
            (Ok(cid), Ok(port)) => Ok(Self::Vsock { cid, port }),
            _ => Err("an address is vsock:CID:PORT, both numbers: vsock:2:5000"),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Vsock { cid, port } => write!(f, "{VSOCK}{cid}:{port}"),
        }
    }
}

impl Place {
    /// Connects to the service there.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn connect(&self) -> Result<Client, ClientError> {
        match self {
            Self::Path(path) => Client::connect(path),
            Self::Vsock { cid, port } => Client::connect_vsock(*cid, *port),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_told_from_a_path() {
        let place = |text: &str| text.parse::<Place>();
        assert_eq!(place("vsock:2:5000"), Ok(Place::Vsock { cid: 2, port: 5000 }));
        assert_eq!(place("vsock:2:5000").unwrap().to_string(), "vsock:2:5000");
        for path in ["/run/forge-vmm/socket", "socket", "./vsock:2:5000", "vsock"] {
            assert_eq!(place(path), Ok(Place::Path(path.into())));
        }
        for wrong in
            ["vsock:", "vsock:2", "vsock:2:", "vsock::5000", "vsock:2:5000:1", "vsock:-1:5"]
        {
            assert!(place(wrong).unwrap_err().contains("vsock:CID:PORT"), "{wrong}");
        }
    }
}
