//! Accounting: what the kernel counts for sockets that are registered with it.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use adit_account::Options;
use adit_ebpf_abi::ORIGIN_BYTES;
use adit_host::cgroup;
use adit_net::accounts::Labels;
use adit_redirect::attach::{Attached, open_cgroup};
use adit_redirect::object::{OBJECT, load};
use aya::maps::{HashMap, MapData};
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::support::accounting::Accounting;
use crate::support::named::{CLIENT, LABELS, TARGET, connect, exchange, listener};
use crate::support::privilege::ready;

async fn loopback() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap()
}

/// Both ends of a connection: the registered one, and the one that the listener accepted.
async fn pair(accounting: &Accounting, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let address = listener.local_addr().unwrap();
    let ours = connect(&accounting.accounts, address).await;
    (ours, listener.accept().await.unwrap().0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_ends_of_a_connection_count_what_they_sent_and_received() {
    if !ready("accounting for both ends of a connection") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let listener = listener(&accounting.accounts);
    let address = listener.local_addr().unwrap();
    let accepting = async {
        let (mut accepted, _) = listener.accept().await.unwrap();
        accounting.accounts.accepted(&accepted, &CLIENT);
        exchange(&mut accepted, 70_001).await
    };
    let connecting = async {
        let mut connected = connect(&accounting.accounts, address).await;
        exchange(&mut connected, 1_234_567).await
    };
    let (there, here) = tokio::join!(accepting, connecting);
    assert_eq!((there, here), (1_234_567, 70_001));
    let client = r#"agent="a",destination_class="""#;
    accounting.ended(LABELS, "target", 1).await;
    accounting.ended(client, "client", 1).await;
    assert_eq!(accounting.bytes(LABELS, "target"), (1_234_567, 70_001));
    assert_eq!(accounting.bytes(client, "client"), (70_001, 1_234_567));
    let segments = accounting.of("segments_total", LABELS, "sent", "target");
    assert!(segments > Some(2), "{segments:?}");
    for family in ["rtt_seconds_count", "lifetime_seconds_count"] {
        let count = accounting.of(family, LABELS, "", "target");
        assert_eq!(count, Some(1), "{family}");
    }
}

#[tokio::test]
async fn unregistered_sockets_are_not_counted() {
    if !ready("accounting for nobody's sockets") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let listener = loopback().await;
    let mut foreign = TcpStream::connect(listener.local_addr().unwrap())
        .await
        .unwrap();
    let (mut accepted, _) = listener.accept().await.unwrap();
    let (sent, received) = tokio::join!(exchange(&mut foreign, 10), exchange(&mut accepted, 20));
    assert_eq!((sent, received), (20, 10));
    drop((foreign, accepted));
    // Events arrive in order: once the end of this registered connection arrives, no event of the first one is outstanding.
    let (mut named, mut accepted) = pair(&accounting, &listener).await;
    let _both = tokio::join!(exchange(&mut named, 1), exchange(&mut accepted, 2));
    drop((named, accepted));
    accounting.ended(LABELS, "target", 1).await;
    assert_eq!(accounting.bytes(LABELS, "target"), (1, 2));
}

/// Limit (accounting): Payload bytes of cleanly closed plaintext connections | the kernel counts what the relay engines
/// count
#[tokio::test]
async fn byte_counts_are_exact_whichever_end_closes_first() {
    if !ready("accounting for half-closed connections") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let listener = loopback().await;
    let mut expected = (0, 0);
    for (round, we_first) in [true, false, true, false].into_iter().enumerate() {
        let (mut ours, mut theirs) = pair(&accounting, &listener).await;
        let (first, second) = if we_first {
            (&mut ours, &mut theirs)
        } else {
            (&mut theirs, &mut ours)
        };
        let mut seen = Vec::new();
        first.write_all(&vec![1; 1_000 + round]).await.unwrap();
        first.shutdown().await.unwrap();
        second.read_to_end(&mut seen).await.unwrap();
        // After the first FIN the other direction continues.
        second.write_all(&vec![2; 50_000 + round]).await.unwrap();
        second.shutdown().await.unwrap();
        first.read_to_end(&mut seen).await.unwrap();
        assert_eq!(seen.len(), 51_000 + 2 * round);
        let (sent, received) = if we_first {
            (1_000, 50_000)
        } else {
            (50_000, 1_000)
        };
        expected.0 += sent + round as u64;
        expected.1 += received + round as u64;
    }
    accounting.ended(LABELS, "target", 4).await;
    assert_eq!(accounting.bytes(LABELS, "target"), expected);
}

#[tokio::test]
async fn a_reset_counts_no_more_bytes_than_were_sent() {
    if !ready("accounting for resets") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let listener = loopback().await;
    for we_reset in [true, false] {
        let (mut ours, mut theirs) = pair(&accounting, &listener).await;
        ours.write_all(&[1; 5_000]).await.unwrap();
        theirs.write_all(&[2; 300]).await.unwrap();
        let mut block = [0; 5_000];
        theirs.read_exact(&mut block).await.unwrap();
        ours.read_exact(&mut block[..300]).await.unwrap();
        let (resets, other) = if we_reset {
            (ours, theirs)
        } else {
            (theirs, ours)
        };
        adit_net::socket::set_reset_on_close(&resets).unwrap();
        drop(resets);
        drop(other);
    }
    accounting.ended(LABELS, "target", 2).await;
    let (sent, received) = accounting.bytes(LABELS, "target");
    // The peer acknowledged the bytes that it read, either with its own data or soon afterwards.
    assert!(
        sent <= 10_000 && received == 600,
        "{sent} sent, {received} received"
    );
}

/// Health probes of load balancers and port scans behave like this. No later event would remove the entry.
#[tokio::test]
async fn a_connection_closed_before_registration_leaves_no_entry() {
    if !ready("accounting for connections that are over early") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let listener = listener(&accounting.accounts);
    let address = listener.local_addr().unwrap();
    let probe = TcpStream::connect(address).await.unwrap();
    let (mut accepted, _) = listener.accept().await.unwrap();
    adit_net::socket::set_reset_on_close(&probe).unwrap();
    drop(probe);
    let over = accepted.read_u8().await.unwrap_err();
    assert_eq!(over.kind(), std::io::ErrorKind::ConnectionReset);
    accounting.accounts.accepted(&accepted, &CLIENT);
    let cookie = accounting.accounts.cookie(&accepted).unwrap();
    assert_eq!(accounting.table.live(cookie), None);
    // A live connection gets an entry.
    let _open = TcpStream::connect(address).await.unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    accounting.accounts.accepted(&accepted, &CLIENT);
    let cookie = accounting.accounts.cookie(&accepted).unwrap();
    assert!(accounting.table.live(cookie).is_some());
}

#[tokio::test]
async fn a_lost_segment_is_counted_as_retransmitted() {
    if !ready("accounting for retransmissions") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    // The listener's accept queue is full, so the kernel drops the SYN of the next client.
    let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    full.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())
        .unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let first = TcpStream::connect(address).await.unwrap();
    let calling = connect(&accounting.accounts, address);
    let making_room = async {
        // `/proc/net/tcp` shows the dropped SYN as a pending retransmission.
        until_syn_is_sent_again(address).await;
        full.accept().unwrap().0
    };
    let (second, accepted) = tokio::join!(calling, making_room);
    drop((first, second, accepted, full));
    accounting.ended(LABELS, "target", 1).await;
    let again = accounting.of("retransmits_total", LABELS, "", "target");
    assert!(again >= Some(1), "{again:?}");
}

/// Waits until the kernel retransmits a SYN to `address`: `/proc/net/tcp` counts retransmissions.
async fn until_syn_is_sent_again(address: SocketAddr) {
    const SYN_SENT: &str = "02";
    let port = format!(":{:04X}", address.port());
    let sent_again = || {
        let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        table.lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields.len() > 6
                && fields[2].ends_with(&port)
                && fields[3] == SYN_SENT
                && fields[6].parse() != Ok(0)
        })
    };
    crate::support::wait::until("a segment sent again", sent_again, String::new).await;
}

/// Limit (accounting): Label sets of accounting
#[tokio::test]
async fn label_sets_beyond_the_limit_are_counted_as_other() {
    if !ready("the cap on series") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(2));
    let listener = loopback().await;
    for agent in ["a", "b", "c", "d", "a"] {
        let socket = TcpSocket::new_v4().unwrap();
        let labels = Labels { agent, ..TARGET };
        accounting.accounts.connecting(&socket, &labels).unwrap();
        let mut ours = socket
            .connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut theirs, _) = listener.accept().await.unwrap();
        let _both = tokio::join!(exchange(&mut ours, 10), exchange(&mut theirs, 1));
    }
    let other = r#"agent="other",destination_class="other""#;
    accounting.ended(other, "target", 2).await;
    accounting.ended(LABELS, "target", 2).await;
    assert_eq!(accounting.bytes(other, "target"), (20, 2));
    assert_eq!(accounting.bytes(LABELS, "target"), (20, 2));
    assert_eq!(accounting.sample("adit_ebpf_account_series"), Some(2));
    let c = r#"agent="c",destination_class="c""#;
    assert_eq!(accounting.of("connections_total", c, "", "target"), None);
}

/// The socket table holds 65,536 entries and evicts sockets without traffic. Evicted sockets count as lost. Connections with
/// traffic stay, and later connections are counted.
///
/// Limit (accounting): Connections accounted for at once | 65,536; beyond that the least recently used is forgotten
#[tokio::test]
async fn a_full_socket_table_evicts_idle_sockets_and_counts_them() {
    if !ready("a full table of sockets") {
        return;
    }
    let mut accounting = Accounting::paused(Options::with_series_max(10));
    let watched = listener(&accounting.accounts);
    let quiet = TcpStream::connect(watched.local_addr().unwrap()).await;
    let (forgotten, _) = watched.accept().await.unwrap();
    accounting.accounts.accepted(&forgotten, &CLIENT);
    let cookie = accounting.accounts.cookie(&forgotten).unwrap();
    assert!(accounting.table.live(cookie).is_some());
    let plain = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (mut kept, mut theirs) = pair(&accounting, &plain).await;
    // A cookie that no socket has.
    const NOBODYS: u64 = 1 << 60;
    let mut named = 0;
    while named < 70_000 || accounting.table.live(cookie).is_some() {
        assert!(named < 1 << 20, "nothing makes room");
        for _socket in 0..1_000 {
            named += 1;
            accounting
                .accounts
                .accepted_cookie(NOBODYS + named, &CLIENT);
        }
    }
    let there = (1..=named)
        .filter(|number| accounting.table.live(NOBODYS + number).is_some())
        .count();
    assert!((16_384..=65_536).contains(&there), "{there} of {named}");
    drop((forgotten, quiet));
    let _both = tokio::join!(exchange(&mut kept, 10), exchange(&mut theirs, 20));
    drop((kept, theirs));
    accounting.resume();
    let lost = r#"adit_ebpf_account_lost_total{reason="unknown"}"#;
    // Sockets of other tests are unknown to this table, too.
    accounting
        .until("a loss", |now| now.sample(lost) >= Some(1))
        .await;
    accounting.ended(LABELS, "target", 1).await;
    assert_eq!(accounting.bytes(LABELS, "target"), (10, 20));
    let (mut later, mut theirs) = pair(&accounting, &plain).await;
    let _both = tokio::join!(exchange(&mut later, 30), exchange(&mut theirs, 40));
    drop((later, theirs));
    accounting.ended(LABELS, "target", 2).await;
    assert_eq!(accounting.bytes(LABELS, "target"), (40, 60));
}

#[tokio::test]
async fn an_open_connection_has_live_counters() {
    if !ready("live numbers") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let listener = loopback().await;
    let (mut ours, mut theirs) = pair(&accounting, &listener).await;
    let cookie = accounting.accounts.cookie(&ours).unwrap();
    // The handshake yields a round-trip time and no payload bytes.
    let account = accounting.table.live(cookie).unwrap().account;
    assert_eq!((account.sent_bytes, account.received_bytes), (0, 0));
    assert!(account.rtt_us > 0, "{account:?}");
    let mut block = [0; 1_000];
    let (mut sent, began) = (0, Instant::now());
    let account = loop {
        ours.write_all(&block).await.unwrap();
        theirs.read_exact(&mut block).await.unwrap();
        theirs.write_all(&block).await.unwrap();
        ours.read_exact(&mut block).await.unwrap();
        sent += 1_000;
        // The eBPF program updates an entry at most ten times a second.
        let account = accounting.table.live(cookie).unwrap().account;
        if account.sent_bytes > 0 {
            break account;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{account:?}");
    };
    // The last round trip may be unmeasured at this time.
    assert!(account.sent_bytes <= sent, "{account:?}");
    assert!(account.received_bytes <= sent, "{account:?}");
    assert!(account.rtt_us > 0, "{account:?}");
    // The connection stays open, and the metrics contain its bytes.
    accounting
        .until("bytes of a connection that goes on", |now| {
            now.of("bytes_total", LABELS, "sent", "target") > Some(0)
        })
        .await;
    let _both = tokio::join!(exchange(&mut ours, 0), exchange(&mut theirs, 0));
    drop((ours, theirs));
    accounting.ended(LABELS, "target", 1).await;
    assert_eq!(accounting.bytes(LABELS, "target"), (sent, sent));
    assert_eq!(accounting.table.live(cookie), None);
}

/// Limit (accounting): Several eBPF programs at `sock_ops` | all see a connection
#[tokio::test]
async fn two_ebpf_programs_see_the_same_connection() {
    if !ready("two programs on one cgroup") {
        return;
    }
    for redirect_first in [true, false] {
        let mut redirect = None;
        if redirect_first {
            redirect = Some(Redirect::attach());
        }
        let accounting = Accounting::start(Options::with_series_max(10));
        let mut redirect = redirect.unwrap_or_else(Redirect::attach);
        let listener = loopback().await;
        let socket = TcpSocket::new_v4().unwrap();
        let cookie = accounting.accounts.connecting(&socket, &TARGET).unwrap();
        redirect
            .origins
            .insert(cookie, [0; ORIGIN_BYTES], 0)
            .unwrap();
        let mut ours = socket
            .connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut theirs, _) = listener.accept().await.unwrap();
        let _both = tokio::join!(exchange(&mut ours, 30), exchange(&mut theirs, 40));
        drop((ours, theirs));
        accounting.ended(LABELS, "target", 1).await;
        assert_eq!(accounting.bytes(LABELS, "target"), (30, 40));
        // The redirect's program also saw the end and removed the socket's original destination.
        let left = || redirect.origins.get(&cookie, 0).is_err();
        crate::support::wait::until("the end of an entry", left, String::new).await;
    }
}

/// The second program at this hook.
struct Redirect {
    origins: HashMap<MapData, u64, [u8; ORIGIN_BYTES]>,
    _attached: Attached,
}

impl Redirect {
    fn attach() -> Self {
        let mut ebpf = load(OBJECT).unwrap();
        let origins = ebpf.take_map("REDIRECT_ORIGINS").unwrap();
        let cgroup = open_cgroup(&cgroup::own().unwrap()).unwrap();
        let mut attached = Attached::default();
        attached
            .sock_ops(&mut ebpf, "adit_redirect_ops", &cgroup)
            .unwrap();
        Self {
            origins: HashMap::try_from(origins).unwrap(),
            _attached: attached,
        }
    }
}

#[test]
fn two_capabilities_are_enough_to_account() {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    if !ready("accounting with two capabilities") {
        return;
    }
    // Capabilities belong to threads: this thread keeps the two that the documentation names.
    let limited = std::thread::spawn(|| {
        let two = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
        let sets = CapabilitySets {
            effective: two,
            permitted: two,
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, sets).unwrap();
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(async {
            let accounting = Accounting::start(Options::with_series_max(1));
            assert!(accounting.table.program().is_some());
        });
    });
    limited.join().unwrap();
}

#[tokio::test]
#[ignore = "a measurement: prints nanoseconds for each call of the program"]
async fn the_cost_of_a_program_call_is_printed() {
    if !ready("measuring the program") {
        return;
    }
    let _counted = aya::sys::enable_stats(aya::sys::Stats::RunTime).unwrap();
    for named in [true, false] {
        let accounting = Accounting::start(Options::with_series_max(10));
        let listener = loopback().await;
        let address = listener.local_addr().unwrap();
        for _connection in 0..200 {
            let mut ours = if named {
                connect(&accounting.accounts, address).await
            } else {
                TcpStream::connect(address).await.unwrap()
            };
            let (mut theirs, _) = listener.accept().await.unwrap();
            let mut block = [0; 64];
            for _echo in 0..100 {
                ours.write_all(&block).await.unwrap();
                theirs.read_exact(&mut block).await.unwrap();
                theirs.write_all(&block).await.unwrap();
                ours.read_exact(&mut block).await.unwrap();
            }
        }
        let program = accounting.table.program().unwrap();
        let mut all = aya::programs::loaded_programs().filter_map(Result::ok);
        let info = all.find(|info| info.id() == program).unwrap();
        let (calls, time) = (info.run_count(), info.run_time());
        println!(
            "named {named}: {calls} calls, {:?} each",
            time / u32::try_from(calls).unwrap()
        );
    }
}
