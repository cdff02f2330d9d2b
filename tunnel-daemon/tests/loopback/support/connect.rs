//! An HTTP-CONNECT client that reads no byte beyond the head of the answer.

use std::io::ErrorKind;
use std::path::Path;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::clients::Io;
use super::wait::within;

/// The head of the answer when a tunnel is open.
pub(crate) const ESTABLISHED: &str = "HTTP/1.1 200 Connection Established\r\n\r\n";

/// The head of the answer, and the socket behind it.
pub(crate) struct Answer {
    pub(crate) head: String,
    pub(crate) stream: UnixStream,
}

impl Answer {
    pub(crate) fn status(&self) -> u16 {
        let code = self.head.split(' ').nth(1);
        let status = code.and_then(|code| code.parse().ok());
        status.unwrap_or_else(|| panic!("no status in {:?}", self.head))
    }
}

/// Writes `request` and reads the head of the answer.
pub(crate) async fn request(socket: &Path, request: &[u8]) -> Answer {
    let mut stream = UnixStream::connect(socket)
        .await
        .expect("the frontend listens");
    say(&mut stream, request).await;
    let head = read_head(&mut stream).await;
    Answer { head, stream }
}

/// Reads to the empty line. If the connection ends first, the head is incomplete.
pub(crate) async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    within("an answer to CONNECT", async {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_ended) => break,
            }
        }
        String::from_utf8(head).expect("heads are text")
    })
    .await
}

/// The request for a target, as kube-apiserver writes it.
pub(crate) fn head(target: &str) -> Vec<u8> {
    format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").into_bytes()
}

/// Opens a tunnel on this connection; fails the test on any answer but a 200.
pub(crate) async fn dial(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), target: &str) {
    say(stream, &head(target)).await;
    let mut answer = read_head(stream).await;
    if answer != ESTABLISHED {
        // The body says why.
        let reading = stream.read_to_string(&mut answer);
        let _end = within("the rest of the answer", reading).await;
    }
    assert_eq!(answer, ESTABLISHED, "answer for {target}");
}

/// Opens a tunnel; fails the test on any answer but a 200.
pub(crate) async fn open(socket: &Path, target: &str) -> UnixStream {
    let stream = UnixStream::connect(socket).await;
    let mut stream = stream.expect("the frontend listens");
    dial(&mut stream, target).await;
    stream
}

/// Status code and body of a refusal, read to EOF.
pub(crate) async fn refused(socket: &Path, bytes: &[u8]) -> (u16, String) {
    let mut answer = request(socket, bytes).await;
    (answer.status(), rest(&mut answer.stream).await)
}

/// Reads this many bytes.
pub(crate) async fn take(stream: &mut (impl AsyncRead + Unpin), bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    let whole = within("bytes to arrive", stream.read_exact(&mut read)).await;
    whole.expect("the tunnel lives");
    read
}

/// All bytes up to EOF or an error.
pub(crate) async fn end(stream: &mut (impl AsyncRead + Unpin)) -> (Vec<u8>, Result<(), ErrorKind>) {
    let mut read = Vec::new();
    let end = within("the end", stream.read_to_end(&mut read)).await;
    (read, end.map(drop).map_err(|error| error.kind()))
}

/// Reads to EOF.
pub(crate) async fn rest(stream: &mut UnixStream) -> String {
    let mut body = String::new();
    within(
        "the end of the connection",
        stream.read_to_string(&mut body),
    )
    .await
    .expect("a clean end");
    body
}

/// Opens this many tunnels at the same time.
pub(crate) async fn open_many(socket: &Path, target: &str, count: usize) -> Vec<UnixStream> {
    let opening: JoinSet<UnixStream> = (0..count)
        .map(|_tunnel| {
            let (socket, target) = (socket.to_owned(), target.to_owned());
            async move { open(&socket, &target).await }
        })
        .collect();
    within("all tunnels", opening.join_all()).await
}

/// As [`open_many`], and each tunnel has echoed.
pub(crate) async fn burst(socket: &Path, target: &str, count: usize) -> Vec<UnixStream> {
    let mut streams = open_many(socket, target, count).await;
    for stream in &mut streams {
        echo(stream, b"each of them works").await;
    }
    streams
}

/// Sends bytes, which the peer must take.
pub(crate) async fn say(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) {
    let taken = within("bytes to be taken", stream.write_all(bytes)).await;
    taken.expect("the peer takes bytes");
}

/// Reads as many bytes as expected, and compares them.
pub(crate) async fn hears(stream: &mut (impl AsyncRead + Unpin), expected: &[u8]) {
    let read = take(stream, expected.len()).await;
    assert!(read == expected, "{} arrived", read.escape_ascii());
}

/// Sends `text` and expects it back.
pub(crate) async fn echo(stream: &mut impl Io, text: &[u8]) {
    say(stream, text).await;
    hears(stream, text).await;
}

/// Sends `bytes`, half-closes, and expects all of them back before EOF.
pub(crate) async fn echo_to_the_end(stream: &mut impl Io, bytes: &[u8]) {
    let (mut read, mut write) = tokio::io::split(stream);
    let back = async {
        let mut back = Vec::new();
        read.read_to_end(&mut back).await.expect("the tunnel lives");
        back
    };
    let there = async {
        write.write_all(bytes).await.expect("the tunnel lives");
        write.shutdown().await.expect("a half-close");
    };
    let (back, ()) = within("the echo", async { tokio::join!(back, there) }).await;
    assert!(back == bytes, "{} bytes of {}", back.len(), bytes.len());
}
