//! A minimal HTTP GET, for probes, metrics and reports of targets.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

/// One answer.
pub struct Answer {
    pub status: u16,
    /// Head and body.
    pub text: String,
}

impl Answer {
    pub fn body(&self) -> &str {
        self.text
            .split_once("\r\n\r\n")
            .map_or("", |(_, body)| body)
    }
}

/// Requests a path.
///
/// # Errors
/// No connection, or no HTTP answer in time.
pub fn get(at: SocketAddr, path: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&at, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    // HTTP/1.0 prevents chunked and keep-alive answers.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: a\r\n\r\n")?;
    let mut raw = Vec::new();
    stream.read_to_end(&mut raw)?;
    let text = String::from_utf8_lossy(&raw).into_owned();
    let code = text.split_whitespace().nth(1);
    let status = code.and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("no answer: {text}")))?;
    Ok(Answer { status, text })
}
