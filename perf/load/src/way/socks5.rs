//! SOCKS5 (RFC 1928), the client's side without authentication: two requests, each with an answer, then bytes.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::Tunnel;

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;
const SUCCEEDED: u8 = 0;
const PORT_BYTES: usize = 2;

/// Opens a tunnel on a connection to a frontend.
///
/// # Errors
/// Another method or reply than the one without an error, or a broken connection.
pub(super) async fn open(mut stream: Tunnel, address: SocketAddr) -> io::Result<Tunnel> {
    stream.write_all(&[VERSION, 1, NO_AUTHENTICATION]).await?;
    let mut method = [0; 2];
    stream.read_exact(&mut method).await?;
    if method != [VERSION, NO_AUTHENTICATION] {
        return Err(io::Error::other(format!(
            "SOCKS5 methods were answered {method:?}"
        )));
    }
    let mut request = vec![VERSION, CONNECT, 0];
    match address.ip() {
        IpAddr::V4(ip) => {
            request.push(IPV4);
            request.extend(ip.octets());
        }
        IpAddr::V6(ip) => {
            request.push(IPV6);
            request.extend(ip.octets());
        }
    }
    request.extend(address.port().to_be_bytes());
    stream.write_all(&request).await?;
    let mut reply = [0; 4];
    stream.read_exact(&mut reply).await?;
    let [version, code, _reserved, kind] = reply;
    if [version, code] != [VERSION, SUCCEEDED] {
        return Err(io::Error::other(format!(
            "SOCKS5 CONNECT was answered {reply:?}"
        )));
    }
    // The address that the proxy dialled from.
    let length = match kind {
        IPV4 => 4,
        IPV6 => 16,
        NAME => usize::from(stream.read_u8().await?),
        _ => {
            return Err(io::Error::other(format!(
                "SOCKS5 has no address type {kind}"
            )));
        }
    };
    let mut bound = vec![0; length + PORT_BYTES];
    stream.read_exact(&mut bound).await?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `open` asks of a proxy that answers so, and the bytes that the tunnel yields then.
    async fn asked(address: &str, reply: &[u8]) -> (Vec<u8>, io::Result<Vec<u8>>) {
        let (near, mut far) = tokio::io::duplex(1024);
        far.write_all(&[VERSION, NO_AUTHENTICATION]).await.unwrap();
        far.write_all(reply).await.unwrap();
        far.shutdown().await.unwrap();
        let opened = open(Box::new(near), address.parse().unwrap()).await;
        let left = match opened {
            Ok(mut tunnel) => {
                let mut left = Vec::new();
                tunnel.read_to_end(&mut left).await.map(|_length| left)
            }
            Err(error) => Err(error),
        };
        let mut asked = Vec::new();
        far.read_to_end(&mut asked).await.unwrap();
        (asked, left)
    }

    #[tokio::test]
    async fn addresses_of_both_families_are_asked_for_and_no_byte_of_the_target_is_lost() {
        for (address, reply, wanted) in [
            (
                "127.0.0.1:258",
                &b"\x05\0\0\x01\x7f\0\0\x01\0\x09hello"[..],
                &b"\x05\x01\0\x05\x01\0\x01\x7f\0\0\x01\x01\x02"[..],
            ),
            (
                "[::1]:258",
                b"\x05\0\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\x09hello",
                b"\x05\x01\0\x05\x01\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\x01\x02",
            ),
            (
                "127.0.0.1:258",
                b"\x05\0\0\x03\x01a\0\x09hello",
                b"\x05\x01\0\x05\x01\0\x01\x7f\0\0\x01\x01\x02",
            ),
        ] {
            let (asked, left) = asked(address, reply).await;
            assert_eq!(asked, wanted, "{address}");
            assert_eq!(left.unwrap(), b"hello", "{address}");
        }
    }

    #[tokio::test]
    async fn refusal_names_the_code() {
        let (_asked, left) = asked("127.0.0.1:1", b"\x05\x05\0\x01\0\0\0\0\0\0").await;
        let error = left.unwrap_err().to_string();
        assert!(error.contains("[5, 5, 0, 1]"), "{error}");
    }
}
