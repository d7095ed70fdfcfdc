//! `ca_file`: whom to trust beside the host's own store.

use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject as _};

use super::ConfigError;
use super::node::Node;

/// Roots in one file of certificates.
const CERTIFICATES_MAX: usize = 1_000;

/// The certificates of the file that `ca_file` of this table names, if it does.
pub(super) fn ca_file(table: &Node<'_>) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let Some(node) = table.field("ca_file") else { return Ok(Vec::new()) };
    let file = Path::new(node.text()?);
    let what = "cannot be read as a file of certificates in PEM";
    let unusable = |error| match error {
        pem::Error::Io(error) => node.unfit(format!("{what}: {error}")),
        _ => node.unfit(what),
    };
    let roots = CertificateDer::pem_file_iter(file)
        .map_err(unusable)?
        .take(CERTIFICATES_MAX)
        .collect::<Result<Vec<_>, _>>()
        .map_err(unusable)?;
    if roots.is_empty() { Err(node.unfit(what)) } else { Ok(roots) }
}
