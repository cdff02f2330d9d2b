//! Free ports of this host, and HTTP to them.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};

/// Ports within the range that upstream's flag check allows.
const PORTS: std::ops::Range<u16> = 14_000..22_000;
/// Time limit of each read of a response.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A port that is currently free.
///
/// # Errors
/// No port is free.
pub fn free_port() -> anyhow::Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    for _ in PORTS {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed) % (PORTS.end - PORTS.start);
        let port = PORTS.start + offset;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port is free from {} to {}", PORTS.start, PORTS.end)
}

/// An HTTP server's response to a GET of `path`.
///
/// # Errors
/// The server does not answer.
pub fn http_get(address: &str, path: &str) -> anyhow::Result<String> {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    ask().with_context(|| format!("asking {address} for {path}"))
}
