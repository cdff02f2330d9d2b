//! SOCKS5 clients, octet by octet.

use std::net::IpAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::clients::Io;
use super::targets;
use super::wait::within;

/// A text behind its length.
pub(crate) fn counted(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len()).expect("it is short");
    [&[length], text.as_bytes()].concat()
}

/// Greeting without a password, and a CONNECT request for this host, all at once.
pub(crate) fn hello(host: &str, port: u16) -> Vec<u8> {
    let host = match host.parse() {
        Ok(IpAddr::V4(ip)) => [&[1][..], &ip.octets()].concat(),
        Ok(IpAddr::V6(ip)) => [&[4][..], &ip.octets()].concat(),
        Err(_name) => [vec![3], counted(host)].concat(),
    };
    [&[5, 1, 0, 5, 1, 0][..], &host, &port.to_be_bytes()].concat()
}

/// Sends `request` and returns the code of the reply.
pub(crate) async fn ask(io: &mut (impl Io + ?Sized), request: &[u8]) -> u8 {
    within("a reply", async {
        io.write_all(request).await.expect("it is taken");
        let mut answers = [0; 12];
        io.read_exact(&mut answers).await.expect("both answers");
        let [5, 0, 5, code, 0, 1, 0, 0, 0, 0, 0, 0] = answers else {
            panic!("{answers:?}");
        };
        code
    })
    .await
}

/// Writes to an echo target and reads it back.
pub(crate) async fn echo(io: &mut (impl Io + ?Sized), bytes: usize) {
    let sent = targets::pattern(0, bytes);
    let (mut reader, mut writer) = tokio::io::split(io);
    let writing = async {
        writer.write_all(&sent).await.expect("it is taken");
        writer.shutdown().await.expect("a half-close");
    };
    let mut received = Vec::new();
    let reading = async { reader.read_to_end(&mut received).await.expect("to its end") };
    within("the echo", async { tokio::join!(writing, reading) }).await;
    assert!(received == sent, "{} of {bytes} bytes", received.len());
}
