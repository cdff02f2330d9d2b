//! The relay allocates neither per byte nor per wake-up. A separate test binary, since a program has one allocator.
#![expect(
    unsafe_code,
    reason = "an allocator is unsafe to write, and only one that counts can tell"
)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

use adit_relay::{Pair, Preference, Relay, RelayConfig, Thresholds, probe};

/// Longer than any step of these tests takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Allocations of relay threads.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static IS_RELAYS: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator with a counter.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: every call is forwarded to `System`, which upholds the contract of `GlobalAlloc`. Counting allocates nothing
// and cannot panic.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // While a thread exits, its thread-local value may already be gone.
        if IS_RELAYS.try_with(Cell::get).unwrap_or(false) {
            ALLOCATIONS.fetch_add(1, Relaxed);
        }
        // SAFETY: the caller upholds the contract of `alloc`, which is the contract of `System.alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`, and `System` allocated all memory.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// A connection through a relay, as its two peers see it.
struct Tunnel {
    client: UnixStream,
    target: UnixStream,
}

impl Tunnel {
    fn echo(&mut self, times: usize) {
        let mut heard = [0; 100];
        for _time in 0..times {
            self.client.write_all(&[1; 100]).expect("it is open");
            self.target.read_exact(&mut heard).expect("it is open");
            self.target.write_all(&heard).expect("it is open");
            self.client.read_exact(&mut heard).expect("it is open");
        }
    }

    /// Sends that many blocks of 64 KiB to the target.
    fn push(&mut self, blocks: usize) {
        static BLOCK: [u8; 64 * 1024] = [2; 64 * 1024];
        let Self { client, target } = self;
        thread::scope(|scope| {
            scope.spawn(|| {
                for _block in 0..blocks {
                    client.write_all(&BLOCK).expect("it is open");
                }
            });
            let mut heard = vec![0; BLOCK.len()];
            for _block in 0..blocks {
                target.read_exact(&mut heard).expect("it is open");
            }
        });
    }
}

/// A connection: the peer's end, with time limits on reads and writes, and the relay's end.
fn sockets() -> (UnixStream, UnixStream) {
    let (ours, relays) = UnixStream::pair().expect("sockets");
    for limit in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
        limit(&ours, Some(PATIENCE)).expect("a limit");
    }
    (ours, relays)
}

#[test]
fn thousands_of_wake_ups_and_many_mebibytes_take_next_to_no_allocation() {
    /// Each echo causes at least two wake-ups.
    const ECHOES: usize = 2_000;
    const BLOCKS: usize = 500;
    // The allowance covers lists that grow to their largest length. After a wake-up, a splice that finds no bytes tries
    // a read, which keeps bytes that arrived meanwhile. That is rare, even with io_uring.
    let movers = [
        (Thresholds::copy_only(), 16),
        (Thresholds::splice_at_once(), 400),
    ];
    for preference in [Preference::Epoll, Preference::IoUring] {
        let choice = match probe(preference) {
            Ok(choice) => choice,
            Err(why) => {
                // Other users may lack io_uring.
                let root = rustix::process::geteuid().is_root();
                let must = root && std::env::var_os("CI").is_some();
                assert!(!must, "{preference:?}: {why}");
                writeln!(io::stderr(), "SKIPPED allocations by {preference:?}: {why}").ok();
                continue;
            }
        };
        for (thresholds, most) in &movers {
            let mut config = RelayConfig::new(choice.clone());
            config.threads = 1;
            config.thresholds = thresholds.clone();
            config.on_thread_start = || IS_RELAYS.set(true);
            let begun = ALLOCATIONS.load(Relaxed);
            let relay = Relay::start(&config).expect("a relay");
            let ((client, a), (target, b)) = (sockets(), sockets());
            let pair = Pair::new(a.into(), b.into());
            let submitted = relay.handle().submit(pair, Box::new(drop));
            submitted.expect("there is room");
            let mut tunnel = Tunnel { client, target };
            // Buffers and lists are allocated at first use.
            tunnel.echo(10);
            tunnel.push(64);
            let warm = ALLOCATIONS.load(Relaxed);
            assert!(warm > begun, "what a thread is made of is counted");
            tunnel.echo(ECHOES);
            tunnel.push(BLOCKS);
            let more = ALLOCATIONS.load(Relaxed) - warm;
            assert!(more <= *most, "{more} allocations with {config:?}");
        }
    }
}
