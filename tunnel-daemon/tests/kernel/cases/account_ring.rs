//! The ring buffer of ended connections: when it wakes its reader, and what happens when it is full.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use adit_account::Options;
use adit_ebpf_abi::{CLOSED_BYTES, wakes};
use tokio::net::TcpListener;

use crate::support::accounting::Accounting;
use crate::support::named::{LABELS, connect, exchange};
use crate::support::privilege::ready;

const RING_BYTES: u32 = 4096;
/// Bytes of one record: the kernel's header and the event.
const RECORD_BYTES: u64 = 8 + CLOSED_BYTES as u64;

fn small_ring() -> Options {
    Options {
        ring_bytes: RING_BYTES,
        ..Options::with_series_max(10)
    }
}

/// Ended connections in the metrics.
fn ended(accounting: &Accounting) -> u64 {
    let ended = accounting.of("connections_total", LABELS, "", "target");
    ended.unwrap_or(0)
}

/// Yields so that other tasks run and handle events that the kernel has ready.
async fn turns() {
    for _turn in 0..1_000 {
        tokio::task::yield_now().await;
    }
}

/// Opens a connection, closes it, and waits until the kernel has removed its entry.
async fn end_one(accounting: &Accounting, listener: &TcpListener) {
    let mut ours = connect(&accounting.accounts, listener.local_addr().unwrap()).await;
    let (mut theirs, _) = listener.accept().await.unwrap();
    let cookie = accounting.accounts.cookie(&ours).unwrap();
    let _both = tokio::join!(exchange(&mut ours, 1), exchange(&mut theirs, 1));
    drop((ours, theirs));
    let limit = Instant::now() + Duration::from_secs(20);
    while accounting.table.live(cookie).is_some() {
        assert!(Instant::now() < limit, "it does not end");
        tokio::task::yield_now().await;
    }
}

/// Time is paused, so the reader's poll interval never elapses. So only a wakeup by the ring makes the reader read.
#[tokio::test(start_paused = true)]
#[expect(clippy::disallowed_methods, reason = "a test on a runtime of its own")]
async fn an_eighth_of_the_ring_wakes_the_reader_before_its_poll_interval() {
    if !ready("waking the reader of a ring") {
        return;
    }
    let accounting = Accounting::start(small_ring());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    // The reader's interval ticks once at its start.
    tokio::time::sleep(Duration::from_millis(450)).await;
    // Paused time advances when the runtime is idle. A blocking task prevents that.
    let (release, held) = std::sync::mpsc::channel::<()>();
    let holding = tokio::task::spawn_blocking(move || held.recv());
    turns().await;
    let ring = u64::from(RING_BYTES);
    let enough = (1..).find(|ends: &u64| wakes(ends * RECORD_BYTES, ring));
    let enough = enough.unwrap();
    for _end in 1..enough {
        end_one(&accounting, &listener).await;
    }
    turns().await;
    assert_eq!(ended(&accounting), 0);
    end_one(&accounting, &listener).await;
    let limit = Instant::now() + Duration::from_secs(20);
    while ended(&accounting) < enough {
        assert!(Instant::now() < limit, "nobody woke the reader");
        tokio::task::yield_now().await;
    }
    drop(release);
    let _released = holding.await.unwrap();
}

#[tokio::test]
async fn events_without_room_in_the_ring_are_counted_as_lost() {
    if !ready("a full ring buffer") {
        return;
    }
    const CONNECTIONS: u64 = 200;
    // The ring has room for about 50 events, and the reader is paused.
    let mut accounting = Accounting::paused(small_ring());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    for _connection in 0..CONNECTIONS {
        let mut ours = connect(&accounting.accounts, listener.local_addr().unwrap()).await;
        let (mut theirs, _) = listener.accept().await.unwrap();
        let _both = tokio::join!(exchange(&mut ours, 1), exchange(&mut theirs, 1));
    }
    accounting.resume();
    let lost = r#"adit_ebpf_account_lost_total{reason="ring_full"}"#;
    accounting
        .until("a sum of all", |now| {
            now.sample(lost).unwrap_or(0) + ended(now) == CONNECTIONS
        })
        .await;
    assert!(ended(&accounting) > 0 && accounting.sample(lost) > Some(0));
}
