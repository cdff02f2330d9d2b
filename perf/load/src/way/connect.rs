//! HTTP CONNECT, the client's side, as kube-apiserver uses it: one request, then bytes.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::Tunnel;

/// Longest response head.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// Most that is shown of the rest of another answer than 200.
const ANSWER_BYTES_MAX: u64 = 1024;

/// Opens a tunnel on a connection to a frontend.
///
/// # Errors
/// A status other than 200, or a broken connection.
pub(super) async fn open(mut stream: Tunnel, address: SocketAddr) -> io::Result<Tunnel> {
    let request = format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::with_capacity(512);
    while !head.ends_with(b"\r\n\r\n") {
        // Targets wait for the client to send first, so no payload follows the head and over-reading is safe.
        if stream.read_buf(&mut head).await? == 0 || head.len() > HEAD_BYTES_MAX {
            break;
        }
    }
    match status(&head) {
        Some(200) if head.ends_with(b"\r\n\r\n") => Ok(stream),
        _ => {
            // The body says why.
            let mut rest = stream.take(ANSWER_BYTES_MAX);
            let _cut = rest.read_to_end(&mut head).await;
            let text = String::from_utf8_lossy(&head);
            Err(io::Error::other(format!("CONNECT was answered {text:?}")))
        }
    }
}

fn status(head: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(head).ok()?;
    let line = text.lines().next()?;
    let rest = line.strip_prefix("HTTP/1.")?;
    rest.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_read_from_http_1_0_and_1_1() {
        assert_eq!(status(b"HTTP/1.1 200 OK\r\n\r\n"), Some(200));
        assert_eq!(status(b"HTTP/1.0 503 Service Unavailable\r\n"), Some(503));
        assert_eq!(status(b"SSH-2.0-x\r\n"), None);
        assert_eq!(status(b""), None);
    }
}
