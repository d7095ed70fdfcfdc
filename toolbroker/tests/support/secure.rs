//! A server over TLS, on loopback, whose certificate only those trust who are told to.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// The name that its certificate is for.
#[derive(Clone, Debug)]
pub struct Identity {
    pub certificate: CertificateDer<'static>,
    config: Arc<rustls::ServerConfig>,
}

impl Identity {
    pub fn of(name: &str) -> Self {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let certificate = made.cert.der().clone();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], PrivateKeyDer::from(key))
            .unwrap();
        Self { certificate, config: Arc::new(config) }
    }

    /// The certificate, as `ca_file` wants it.
    pub fn pem(&self) -> String {
        let text = STANDARD.encode(&self.certificate);
        format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
    }

    /// Answers each request with what `answer` makes of it, byte for byte, and closes. The
    /// port, and what was heard: the name that was asked for, and the request.
    pub fn serve(&self, answer: fn(&str) -> Vec<u8>) -> (u16, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let heard: Arc<Mutex<Vec<String>>> = Arc::default();
        let (heard_here, config) = (Arc::clone(&heard), Arc::clone(&self.config));
        // Ends with the test's process.
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let mut tls = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
                let mut secured = rustls::Stream::new(&mut tls, &mut stream);
                let mut request = [0; 4096];
                let Ok(bytes) = secured.read(&mut request) else { continue };
                let text = String::from_utf8_lossy(&request[..bytes]).into_owned();
                let answer = answer(&text);
                let name = secured.conn.server_name().unwrap_or("no name").to_owned();
                // Before the answer: whoever has it looks at once.
                heard_here.lock().unwrap().push(format!("{name} {text}"));
                let _ = secured.write_all(&answer);
                tls.send_close_notify();
                let _ = tls.write_tls(&mut stream);
            }
        });
        (port, heard)
    }
}
