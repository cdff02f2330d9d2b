//! The targets: echo, a source that can be endless, a sink that counts, and a port that reports the count.
//!
//! They use the protocol of the interop targets: a line with a number starts the source, which sends that many bytes, or endlessly
//! for 0. A line `ID -1` starts the sink. Here alone a line `0 RATE` makes the source send RATE bytes a second, endlessly.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

/// Size of a source's write and of a sink's read: large, so that targets cost little CPU time.
const PIECE_BYTES: usize = 256 * 1024;
/// Writes a second of a source with a rate, if it is no higher than those can carry.
const WRITES_PER_S: u64 = 100;
/// Longest line that starts a source or sink.
const LINE_BYTES_MAX: u64 = 64;

/// Bytes all sinks have received since the start.
type Received = Arc<AtomicU64>;

#[derive(Clone, Copy)]
enum Role {
    Echo,
    Source,
    Sink,
    Control,
}

/// Serves until standard input closes. Echo has its own thread, so that bulk transfers do not delay it.
///
/// # Errors
/// No port is free.
pub(crate) fn serve(host: IpAddr) -> anyhow::Result<()> {
    let received = Received::default();
    let bulk = Runtime::new()?;
    let echoing = Builder::new_current_thread().enable_all().build()?;
    let start = |runtime: &Runtime, role| -> anyhow::Result<SocketAddr> {
        let listener = runtime
            .block_on(TcpListener::bind((host, 0)))
            .with_context(|| format!("listening on {host}"))?;
        let address = listener.local_addr()?;
        // The runtime keeps the task until it is dropped.
        let _serving = runtime.spawn(accept(listener, role, Received::clone(&received)));
        Ok(address)
    };
    let addresses = json!({
        "echo": start(&echoing, Role::Echo)?,
        "source": start(&bulk, Role::Source)?,
        "sink": start(&bulk, Role::Sink)?,
        "control": start(&bulk, Role::Control)?,
    });
    std::thread::spawn(move || echoing.block_on(std::future::pending::<()>()));
    println!("{addresses}");
    crate::parent_death::until_stdin_closes()
}

async fn accept(listener: TcpListener, role: Role, received: Received) {
    let mut connections = JoinSet::new();
    // Errors of accept pass: a client has gone, or descriptors are short for a moment. The loop ends with the runtime.
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _peer)) => {
                let received = Received::clone(&received);
                connections.spawn(async move {
                    // The peer sees how the connection ended.
                    let _over = one(stream, role, &received).await;
                });
            }
            Err(_passing) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn one(stream: TcpStream, role: Role, received: &AtomicU64) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    match role {
        Role::Echo => echo(stream).await,
        Role::Source => source(stream).await,
        Role::Sink => sink(stream, received).await,
        Role::Control => control(stream, received).await,
    }
}

async fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    let (mut from, mut to) = stream.split();
    tokio::io::copy(&mut from, &mut to).await?;
    to.shutdown().await
}

async fn source(stream: TcpStream) -> std::io::Result<()> {
    let mut stream = BufReader::with_capacity(128, stream);
    let asked = line(&mut stream).await?;
    let (asked, rate) = asked.trim().split_once(' ').unwrap_or((&asked, "0"));
    let number = |text: &str| text.trim().parse::<u64>().map_err(std::io::Error::other);
    let (asked, rate) = (number(asked)?, number(rate)?);
    let mut stream = stream.into_inner();
    if rate > 0 {
        return paced_source(stream, rate).await;
    }
    let piece = vec![b'x'; PIECE_BYTES];
    // Practically endless.
    let mut left = if asked == 0 { u64::MAX } else { asked };
    while left > 0 {
        let length = usize::try_from(left).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        stream
            .write_all(piece.get(..length).unwrap_or_default())
            .await?;
        left -= length as u64;
        // Many streams share few threads: yield after each write.
        tokio::task::yield_now().await;
    }
    stream.shutdown().await
}

/// Sends `rate` bytes a second for as long as they are taken.
async fn paced_source(mut stream: TcpStream, rate: u64) -> std::io::Result<()> {
    let bytes = usize::try_from(rate / WRITES_PER_S).unwrap_or(usize::MAX);
    let piece = vec![b'x'; bytes.clamp(1, PIECE_BYTES)];
    let every = Duration::from_secs_f64(piece.len() as f64 / rate as f64);
    let mut steps = tokio::time::interval(every);
    loop {
        steps.tick().await;
        stream.write_all(&piece).await?;
    }
}

async fn sink(stream: TcpStream, received: &AtomicU64) -> std::io::Result<()> {
    let mut stream = BufReader::with_capacity(128, stream);
    line(&mut stream).await?;
    let early = stream.buffer().len() as u64;
    received.fetch_add(early, Ordering::Relaxed);
    let mut stream = stream.into_inner();
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return stream.shutdown().await,
            length => {
                received.fetch_add(length as u64, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Answers each line with the number of bytes received so far.
async fn control(stream: TcpStream, received: &AtomicU64) -> std::io::Result<()> {
    let mut stream = BufReader::with_capacity(128, stream);
    while !line(&mut stream).await?.is_empty() {
        let answer = format!("{}\n", received.load(Ordering::Relaxed));
        stream.write_all(answer.as_bytes()).await?;
    }
    Ok(())
}

/// Reads one line, including its end; empty at EOF.
async fn line(stream: &mut BufReader<TcpStream>) -> std::io::Result<String> {
    let mut line = String::new();
    stream.take(LINE_BYTES_MAX).read_line(&mut line).await?;
    Ok(line)
}
