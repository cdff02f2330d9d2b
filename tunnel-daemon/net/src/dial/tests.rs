//! Tests of the dialler: error texts, the race of addresses, the allow-list, the deadline.

use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use super::*;
use crate::resolve::{Answer, SrvRecord};

/// Upstream's limit on a dial.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A resolver that answers from a list; the name `slow` never answers.
#[derive(Default)]
struct Book(HashMap<&'static str, Result<Vec<IpAddr>, ResolveError>>);

impl Book {
    fn with(mut self, name: &'static str, ips: &str) -> Self {
        let ips = ips
            .split_whitespace()
            .map(|ip| ip.parse().unwrap())
            .collect();
        self.0.insert(name, Ok(ips));
        self
    }

    fn failing(mut self, name: &'static str, error: ResolveError) -> Self {
        self.0.insert(name, Err(error));
        self
    }
}

impl Resolve for Book {
    fn lookup_ip<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<IpAddr>> {
        Box::pin(async move {
            if name == "slow" {
                pending::<()>().await;
            }
            let known = self.0.get(name).cloned();
            known.unwrap_or(Err(ResolveError::NotFound))
        })
    }

    fn lookup_srv<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<SrvRecord>> {
        Box::pin(async { Err(ResolveError::NotFound) })
    }
}

/// Behaviour of one address after that many milliseconds.
#[derive(Clone, Copy)]
enum Does {
    Accepts(u64),
    Fails(u64, Errno),
    Nothing,
}

/// A simulated network: addresses not in it never answer. Records each attempt with its start time.
struct Paper {
    does: HashMap<SocketAddr, Does>,
    started: Mutex<Vec<(SocketAddr, u128)>>,
    running: AtomicUsize,
    zero: Instant,
}

impl Paper {
    fn new(does: &[(&str, Does)]) -> Arc<Self> {
        Arc::new(Self {
            does: does
                .iter()
                .map(|(addr, does)| (addr.parse().unwrap(), *does))
                .collect(),
            started: Mutex::default(),
            running: AtomicUsize::new(0),
            zero: Instant::now(),
        })
    }

    fn starts(&self) -> Vec<String> {
        let started = self.started.lock().unwrap();
        // Timers round up by up to 1 ms; steps of the tests are tens of milliseconds.
        started
            .iter()
            .map(|(addr, at)| format!("{addr}@{}", at / 10 * 10))
            .collect()
    }
}

/// Decrements the count of attempts on drop, however the attempt ends.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connect for Arc<Paper> {
    type Stream = SocketAddr;

    async fn connect(&self, addr: SocketAddr, _name: Option<&str>) -> io::Result<SocketAddr> {
        self.started
            .lock()
            .unwrap()
            .push((addr, self.zero.elapsed().as_millis()));
        self.running.fetch_add(1, Ordering::Relaxed);
        let _counted = Counted(&self.running);
        match self.does.get(&addr).copied().unwrap_or(Does::Nothing) {
            Does::Accepts(after) => {
                sleep(Duration::from_millis(after)).await;
                Ok(addr)
            }
            Does::Fails(after, errno) => {
                sleep(Duration::from_millis(after)).await;
                Err(errno.into())
            }
            Does::Nothing => pending().await,
        }
    }
}

fn on_paper(book: Book, allowed: &[&str], paper: &Arc<Paper>) -> Dialer<Arc<Paper>> {
    let allowed = DestinationList::allow_targets(allowed).unwrap();
    let (book, allowed) = (Arc::new(book), Arc::new(allowed));
    Dialer::with_connect(book, allowed, TIMEOUT, Arc::clone(paper))
}

/// A dialler to all addresses, for which the name `h` has these.
fn to_h(ips: &str, paper: &Arc<Paper>) -> Dialer<Arc<Paper>> {
    on_paper(Book::default().with("h", ips), &[], paper)
}

fn real(book: Book, allowed: &[&str]) -> Dialer {
    let allowed = Arc::new(DestinationList::allow_targets(allowed).unwrap());
    Dialer::accounted(
        Arc::new(book),
        Arc::<DestinationList>::clone(&allowed),
        allowed,
        TIMEOUT,
        Accounts::off(),
        OwnSockets::off(),
        "",
    )
}

#[tokio::test]
async fn a_listener_is_reached_by_address_and_by_name_with_socket_options() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let dialer = real(Book::default().with("web", "127.0.0.1"), &[]);
    for address in [
        format!("127.0.0.1:{port}"),
        format!("web:{port}"),
        format!("[::ffff:127.0.0.1]:{port}"),
    ] {
        let stream = dialer.dial("tcp", &address).await.unwrap();
        assert!(stream.nodelay().unwrap());
        let socket = socket2::SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        let keepalive = socket.tcp_keepalive_time().unwrap();
        assert_eq!(keepalive, Duration::from_secs(15));
        assert_eq!(stream.peer_addr().unwrap().port(), port);
    }
}

#[tokio::test]
async fn a_closed_port_is_refused_in_the_words_of_go() {
    // Bound without a listener, so no other test gets the port meanwhile.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let addr = socket.local_addr().unwrap();
    let dialer = real(Book::default(), &[]);
    let error = dialer.dial("tcp", &addr.to_string()).await.unwrap_err();
    let text = format!("dial tcp {addr}: connect: connection refused");
    assert_eq!(error.to_string(), text);
    assert!(!error.is_timeout());
}

#[tokio::test(start_paused = true)]
async fn every_failure_has_the_text_of_go() {
    let paper = Paper::new(&[
        ("10.0.0.1:80", Does::Fails(0, Errno::CONNREFUSED)),
        ("10.0.0.2:80", Does::Fails(0, Errno::HOSTUNREACH)),
        ("[fd00::1]:80", Does::Fails(0, Errno::NETUNREACH)),
        ("10.0.0.3:80", Does::Fails(0, Errno::CONNRESET)),
        ("10.0.0.4:80", Does::Fails(0, Errno::MFILE)),
        ("10.0.0.5:80", Does::Fails(0, Errno::TIMEDOUT)),
    ]);
    let book = Book::default()
        .failing("broken", ResolveError::Misbehaving)
        .failing("late", ResolveError::TimedOut)
        .with("dual", "10.0.0.1 fd00::1");
    let dialer = on_paper(book, &[], &paper);
    for (protocol, address, why) in [
        ("tcp", "10.0.0.1", "connect: connection refused"),
        ("tcp4", "10.0.0.2", "connect: no route to host"),
        ("tcp6", "[fd00::1]", "connect: network is unreachable"),
        ("tcp", "10.0.0.3", "connect: connection reset by peer"),
        ("tcp", "10.0.0.4", "socket: too many open files"),
        ("tcp", "10.0.0.5", "connect: connection timed out"),
        ("tcp", "10.9.9.9", "i/o timeout"),
    ] {
        let address = format!("{address}:80");
        let error = dialer.dial(protocol, &address).await.unwrap_err();
        let text = format!("dial {protocol} {address}: {why}");
        assert_eq!(error.to_string(), text);
        assert_eq!(error.is_timeout(), why.contains("time"), "{text}");
    }
    for (protocol, address, text) in [
        ("tcp", "slow:80", "tcp: lookup slow: i/o timeout"),
        ("tcp", "late:80", "tcp: lookup late: i/o timeout"),
        ("tcp", "Gone:80", "tcp: lookup gone: no such host"),
        ("tcp", "broken:80", "tcp: lookup broken: server misbehaving"),
        (
            "tcp",
            "dual:80",
            "tcp 10.0.0.1:80: connect: connection refused",
        ),
        ("tcp", "x", "tcp: address x: missing port in address"),
        ("tcp", "::1", "tcp: address ::1: too many colons in address"),
        (
            "tcp6",
            "10.0.0.1:80",
            "tcp6: address 10.0.0.1: no suitable address found",
        ),
        ("foo", "x:1", "foo: unknown network foo"),
        ("udp", "10.0.0.1:53", "udp: unknown network udp"),
        ("unix", "/run/x.sock", "unix: unknown network unix"),
        ("", "10.0.0.1:80", ": unknown network "),
        ("TCP\n", "x:1", "TCP\\n: unknown network TCP\\n"),
    ] {
        let error = dialer.dial(protocol, address).await.unwrap_err();
        assert_eq!(error.to_string(), format!("dial {text}"));
        assert_eq!(error.is_timeout(), text.ends_with("timeout"), "{text}");
    }
}

/// Limit (times): Dial of a target at an agent, over all addresses | 5 s
#[tokio::test(start_paused = true)]
async fn the_deadline_covers_all_addresses_together() {
    let paper = Paper::new(&[]);
    let dialer = to_h("10.0.0.1 10.0.0.2 10.0.0.3", &paper);
    let start = Instant::now();
    let error = dialer.dial("tcp", "h:80").await.unwrap_err();
    assert_eq!(error.to_string(), "dial tcp 10.0.0.1:80: i/o timeout");
    assert_eq!(start.elapsed().as_secs(), TIMEOUT.as_secs());
    assert_eq!(paper.running.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn families_take_turns_every_300_ms_and_the_first_success_cancels_the_rest() {
    let paper = Paper::new(&[("10.0.0.1:80", Does::Accepts(400))]);
    let dialer = to_h("10.0.0.1 10.0.0.2 fd00::1 fd00::2", &paper);
    let won = dialer.dial("tcp", "h:80").await.unwrap();
    assert_eq!(won, "10.0.0.1:80".parse().unwrap());
    assert_eq!(
        paper.starts(),
        ["[fd00::1]:80@0", "10.0.0.1:80@300", "[fd00::2]:80@600"]
    );
    assert_eq!(paper.running.load(Ordering::Relaxed), 0, "losers are gone");
}

#[tokio::test(start_paused = true)]
async fn a_failure_starts_the_next_address_at_once() {
    let paper = Paper::new(&[
        ("[fd00::1]:80", Does::Fails(10, Errno::NETUNREACH)),
        ("10.0.0.1:80", Does::Fails(10, Errno::CONNREFUSED)),
        ("10.0.0.2:80", Does::Accepts(0)),
    ]);
    let dialer = to_h("10.0.0.1 10.0.0.2 fd00::1", &paper);
    dialer.dial("tcp", "h:80").await.unwrap();
    assert_eq!(
        paper.starts(),
        ["[fd00::1]:80@0", "10.0.0.1:80@10", "10.0.0.2:80@20"]
    );
}

#[tokio::test(start_paused = true)]
async fn tcp4_and_tcp6_use_one_family() {
    let paper = Paper::new(&[
        ("10.0.0.1:80", Does::Accepts(0)),
        ("[fd00::1]:80", Does::Accepts(0)),
    ]);
    let dialer = to_h("10.0.0.1 fd00::1", &paper);
    assert!(dialer.dial("tcp4", "h:80").await.unwrap().is_ipv4());
    assert!(dialer.dial("tcp6", "h:80").await.unwrap().is_ipv6());
}

/// A zone is a number or the name of an interface; any other zone is dropped, as in Go.
#[tokio::test(start_paused = true)]
async fn the_zone_of_an_address_is_dialled() {
    let paper = Paper::new(&[
        ("[fe80::1%7]:80", Does::Accepts(0)),
        ("[fe80::1%1]:80", Does::Accepts(0)),
        ("[fe80::1]:80", Does::Fails(0, Errno::INVAL)),
    ]);
    let dialer = on_paper(Book::default(), &["fe80::/10"], &paper);
    let dialled = dialer.dial("tcp", "[fe80::1%7]:80").await.unwrap();
    assert_eq!(dialled.to_string(), "[fe80::1%7]:80");
    if interfaces::index_of("lo") == Some(1) {
        let dialled = dialer.dial("tcp", "[fe80::1%lo]:80").await.unwrap();
        assert_eq!(dialled.to_string(), "[fe80::1%1]:80");
    }
    let unknown = dialer.dial("tcp", "[fe80::1%none]:80").await.unwrap_err();
    let unknown = unknown.to_string();
    assert!(unknown.contains("invalid argument"), "{unknown}");
    let unnamed = on_paper(Book::default(), &[], &paper);
    let denied = unnamed.dial("tcp", "[fe80::1%7]:80").await.unwrap_err();
    assert!(denied.is_denied(), "{denied}");
}

/// A name with addresses of both families, on a host without IPv6.
#[tokio::test(start_paused = true)]
async fn a_timeout_names_an_address_that_has_not_failed() {
    let paper = Paper::new(&[("[fd00::1]:80", Does::Fails(0, Errno::NETUNREACH))]);
    let dialer = to_h("10.0.0.1 fd00::1", &paper);
    let error = dialer.dial("tcp", "h:80").await.unwrap_err();
    assert_eq!(error.to_string(), "dial tcp 10.0.0.1:80: i/o timeout");
    assert!(error.is_timeout());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_dial_leaves_no_attempt_behind() {
    let paper = Paper::new(&[]);
    let dialer = to_h("10.0.0.1 fd00::1", &paper);
    tokio::select! {
        result = dialer.dial("tcp", "h:80") => panic!("{result:?}"),
        () = sleep(Duration::from_millis(500)) => (),
    }
    assert_eq!(paper.starts().len(), 2);
    assert_eq!(paper.running.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_no_entry_could_cover_is_not_looked_up() {
    let paper = Paper::new(&[]);
    let dialer = on_paper(Book::default(), &["web:80"], &paper);
    let error = dialer.dial("tcp", "slow:80").await.unwrap_err();
    assert!(error.is_denied() && !error.is_timeout(), "{error}");
    assert_eq!(
        error.to_string(),
        "dial tcp: --allow-target of the agent: destination slow:80 is not on the list of allowed destinations"
    );
}

#[tokio::test(start_paused = true)]
async fn a_name_that_resolves_to_the_metadata_address_is_denied_unconnected() {
    let paper = Paper::new(&[("169.254.169.254:80", Does::Accepts(0))]);
    let book = || {
        Book::default()
            .with("rebound", "169.254.169.254")
            .with("mapped", "::ffff:169.254.169.254")
    };
    for address in [
        "169.254.169.254:80",
        "rebound:80",
        "mapped:80",
        "[::ffff:169.254.169.254]:80",
    ] {
        let dialer = on_paper(book(), &[], &paper);
        let error = dialer.dial("tcp", address).await.unwrap_err();
        assert!(error.is_denied() && !error.is_timeout(), "{error}");
        let text = "dial tcp 169.254.169.254:80: --allow-target of the agent: destination";
        assert!(error.to_string().starts_with(text), "{error}");
    }
    assert_eq!(paper.starts(), [""; 0]);
    let dialer = on_paper(book(), &["169.254.169.254:80"], &paper);
    dialer.dial("tcp", "rebound:80").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_list_is_checked_for_each_resolved_address() {
    let paper = Paper::new(&[
        ("10.0.0.1:80", Does::Accepts(0)),
        ("192.168.0.1:80", Does::Accepts(0)),
    ]);
    let book = Book::default()
        .with("h", "192.168.0.1 10.0.0.1")
        .with("out", "192.168.0.1");
    let dialer = on_paper(book, &["10.0.0.0/8", "out:80"], &paper);
    let dialled = dialer.dial("tcp", "h:80").await.unwrap();
    assert_eq!(dialled.to_string(), "10.0.0.1:80");
    assert_eq!(paper.starts(), ["10.0.0.1:80@0"]);
    let denied = dialer.dial("tcp", "192.168.0.1:80").await;
    assert!(denied.unwrap_err().is_denied());
    dialer.dial("tcp", "OUT:80").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_empty_host_and_the_unspecified_address_mean_this_machine() {
    let paper = Paper::new(&[
        ("127.0.0.1:80", Does::Accepts(0)),
        ("[::1]:80", Does::Accepts(0)),
    ]);
    let dialer = on_paper(Book::default(), &["127.0.0.0/8"], &paper);
    for address in [":80", "0.0.0.0:80"] {
        let dialled = dialer.dial("tcp", address).await.unwrap();
        assert_eq!(dialled.to_string(), "127.0.0.1:80");
    }
    let strict = on_paper(Book::default(), &["10.0.0.0/8"], &paper);
    for address in [":80", "0.0.0.0:80", "[::]:80", "localhost:80"] {
        assert!(strict.dial("tcp", address).await.is_err(), "{address}");
    }
}

/// Limit (peers): Addresses of one name that a dial tries | 32
#[tokio::test(start_paused = true)]
async fn a_dial_tries_at_most_32_addresses_of_a_name() {
    let ips: Vec<String> = (0..200).map(|n| format!("10.0.1.{n}")).collect();
    let refused: Vec<String> = ips.iter().map(|ip| format!("{ip}:80")).collect();
    let refuses = |at| (at, Does::Fails(0, Errno::CONNREFUSED));
    let does: Vec<_> = refused.iter().map(String::as_str).map(refuses).collect();
    let (paper, ips) = (Paper::new(&does), ips.join(" "));
    let dialer = to_h(&ips, &paper);
    assert!(dialer.dial("tcp", "h:80").await.is_err());
    assert_eq!(paper.starts().len(), ADDRESSES_MAX);
}
