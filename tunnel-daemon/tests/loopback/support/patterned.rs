//! Tunnels whose every byte follows from its position in the stream. Both ends check the bytes as they arrive.

use std::io;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use adit_net::tasks::Tasks;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::connect;
use super::targets::{pattern, serve};
use super::wait::{until_for, within};
use super::world::{channel, open};

const BLOCK_BYTES: usize = 32 * 1024;
/// Far below the size from which a relay splices.
const SMALL_CHUNK_BYTES: usize = 512;
/// Time for megabytes through debug builds on a busy machine.
const MOVES_WITHIN: Duration = Duration::from_secs(120);
/// A stream repeats after this many bytes: a prime, so that no block size hides a shift.
const PERIOD: u64 = 251;

/// The `count` bytes expected from `at` on; at most [`BLOCK_BYTES`].
fn expected(at: u64, count: usize) -> &'static [u8] {
    static TWICE: OnceLock<Vec<u8>> = OnceLock::new();
    let table = TWICE.get_or_init(|| pattern(0, 2 * BLOCK_BYTES));
    let from = usize::try_from(at % PERIOD).expect("small");
    &table[from..from + count]
}

/// Counts of correct and of wrong bytes.
#[derive(Default)]
pub(crate) struct Ledger {
    right: AtomicU64,
    wrong: AtomicU64,
}

impl Ledger {
    fn check(&self, at: u64, bytes: &[u8]) {
        let found = if bytes == expected(at, bytes.len()) {
            &self.right
        } else {
            &self.wrong
        };
        found.fetch_add(bytes.len() as u64, Relaxed);
    }

    /// Number of correct bytes.
    pub(crate) fn right(&self) -> u64 {
        self.right.load(Relaxed)
    }

    pub(crate) fn assert_intact(&self, whose: &str) {
        let (right, wrong) = (self.right(), self.wrong.load(Relaxed));
        assert_eq!(wrong, 0, "{whose}: blocks are wrong, beside {right} bytes");
        assert!(right > 0, "{whose}: nothing came");
    }
}

/// A target that echoes and checks what it receives. A stream may begin anywhere in the pattern.
pub(crate) async fn target() -> (u16, Tasks, Arc<Ledger>) {
    let ledger = Arc::new(Ledger::default());
    let seen = Arc::clone(&ledger);
    let (port, tasks) = serve(move |stream| echo(stream, Arc::clone(&seen))).await;
    (port, tasks, ledger)
}

async fn echo(mut stream: TcpStream, ledger: Arc<Ledger>) -> io::Result<()> {
    let (mut block, mut next) = (vec![0; BLOCK_BYTES], None);
    loop {
        let count = stream.read(&mut block).await?;
        let Some(first) = block[..count].first().copied() else {
            return stream.shutdown().await;
        };
        let at = next.unwrap_or_else(|| u64::from(first));
        ledger.check(at, &block[..count]);
        next = Some(at + count as u64);
        stream.write_all(&block[..count]).await?;
    }
}

/// How tunnels of a [`Load`] send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sends {
    /// The client sends without pause, whatever has come back.
    Bulk,
    /// The client sends small chunks, and some are always in flight. Otherwise a client that is gone could look like one that
    /// has finished.
    SmallChunks,
}

/// Tunnels that send until they are cut.
pub(crate) struct Load {
    tunnels: JoinSet<()>,
    /// Checks the bytes that came back to the clients.
    pub(crate) ledger: Arc<Ledger>,
}

impl Load {
    /// Opens this many tunnels, each on its own connection, and every other one in the gRPC dialect. `http` and `grpc` are the
    /// sockets of a server.
    pub(crate) async fn start(
        http: &Path,
        grpc: &Path,
        target: &str,
        tunnels: u64,
        sends: Sends,
    ) -> Self {
        let mut load = Self {
            tunnels: JoinSet::new(),
            ledger: Arc::new(Ledger::default()),
        };
        for number in 0..tunnels {
            let ledger = Arc::clone(&load.ledger);
            if number % 2 == 0 {
                let stream = connect::open(http, target).await;
                load.tunnels.spawn(drive(stream, number, sends, ledger));
            } else {
                let tunnel = open(channel(grpc).await, target).await;
                let io = tunnel.into_io();
                load.tunnels.spawn(drive(io, number, sends, ledger));
            }
        }
        load
    }

    /// Waits until this many more bytes have come back.
    pub(crate) async fn moves(&self, bytes: u64) {
        let enough = self.ledger.right() + bytes;
        until_for(MOVES_WITHIN, &format!("{bytes} bytes more"), || {
            self.ledger.right() >= enough
        })
        .await;
    }

    /// Waits until every tunnel was cut.
    pub(crate) async fn ended(&mut self) {
        within("all tunnels to end", async {
            while let Some(tunnel) = self.tunnels.join_next().await {
                tunnel.expect("it only sends and reads");
            }
        })
        .await;
    }

    /// Asserts that no tunnel was cut.
    pub(crate) fn assert_open(&mut self) {
        let ended = self.tunnels.try_join_next();
        assert!(ended.is_none(), "a tunnel was cut");
    }
}

/// Runs one tunnel of a [`Load`] until its echo ends.
async fn drive<S>(io: S, start: u64, sends: Sends, ledger: Arc<Ledger>)
where
    S: AsyncRead + AsyncWrite,
{
    let (mut read, mut write) = tokio::io::split(io);
    if sends == Sends::SmallChunks {
        let (mut block, mut there, mut back) = ([0; SMALL_CHUNK_BYTES], start, start);
        loop {
            while there < back + 2 * SMALL_CHUNK_BYTES as u64 {
                if write
                    .write_all(expected(there, SMALL_CHUNK_BYTES))
                    .await
                    .is_err()
                {
                    return;
                }
                there += SMALL_CHUNK_BYTES as u64;
            }
            let Ok(count @ 1..) = read.read(&mut block).await else {
                return;
            };
            ledger.check(back, &block[..count]);
            back += count as u64;
        }
    }
    let sending = async {
        let mut at = start;
        while write.write_all(expected(at, BLOCK_BYTES)).await.is_ok() {
            at += BLOCK_BYTES as u64;
        }
        // Bytes that are still in flight are checked, too.
        std::future::pending::<()>().await;
    };
    let checking = async {
        let (mut block, mut at) = (vec![0; BLOCK_BYTES], start);
        while let Ok(count @ 1..) = read.read(&mut block).await {
            ledger.check(at, &block[..count]);
            at += count as u64;
        }
    };
    tokio::select! {
        () = checking => (),
        () = sending => (),
    }
}
