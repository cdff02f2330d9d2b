//! Accounting: what the kernel counts of sockets that are named to it.

use std::net::{Ipv4Addr, SocketAddr};

use adit::ebpf::account::{Accounts, Labels, Options, start};
use adit::telemetry::ServerMetrics;
use adit::telemetry::labels::AccountRole;
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use crate::support::privilege::ready;
use crate::support::wait::until;

const TARGET: Labels<'_> = Labels {
    role: AccountRole::Target,
    agent: "a",
    destination_class: "c",
};
const CLIENT: Labels<'_> = Labels {
    role: AccountRole::Client,
    agent: "a",
    destination_class: "",
};
const LABELS: &str = r#"agent="a",destination_class="c""#;

/// Accounting with its reader.
struct Accounting {
    accounts: Accounts,
    metrics: ServerMetrics,
    reader: JoinHandle<()>,
}

impl Accounting {
    fn start(options: Options) -> Self {
        let metrics = ServerMetrics::new(&[]);
        let (accounts, reader) = start(options, metrics.adit().account().clone()).unwrap();
        Self {
            accounts,
            metrics,
            reader: spawn(reader.run()),
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "counts, far below 2^53"
    )]
    fn sample(&self, series: &str) -> Option<u64> {
        let text = self.metrics.scrape().text();
        text.lines()
            .filter_map(|line| line.rsplit_once(' '))
            .find(|(name, _)| *name == series)
            .and_then(|(_, value)| value.parse::<f64>().ok())
            .map(|value| value as u64)
    }

    /// `name{labels,role,tenant}` and perhaps a direction, as exported.
    fn of(&self, name: &str, labels: &str, direction: &str, role: &str) -> Option<u64> {
        let direction = match direction {
            "" => String::new(),
            direction => format!(r#",direction="{direction}""#),
        };
        self.sample(&format!(
            r#"adit_ebpf_{name}{{{labels}{direction},role="{role}",tenant="default"}}"#
        ))
    }

    async fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let lines = || {
            let text = self.metrics.scrape().text();
            let ours = text.lines().filter(|line| line.starts_with("adit_ebpf"));
            ours.collect::<Vec<_>>().join("\n")
        };
        until(what, || done(self), lines).await;
    }
}

impl Drop for Accounting {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

#[expect(clippy::disallowed_methods, reason = "a test has no task limits")]
fn spawn<F: Future<Output = ()> + Send + 'static>(future: F) -> JoinHandle<()> {
    tokio::spawn(future)
}

/// Connects a socket that is named to the kernel.
async fn connect(accounts: &Accounts, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    accounts.connecting(&socket, &TARGET).unwrap();
    socket.connect(address).await.unwrap()
}

/// A listener whose connections the kernel will look at.
fn listener(accounts: &Accounts) -> TcpListener {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&address.into()).unwrap();
    accounts.listening(&socket);
    socket.listen(16).unwrap();
    socket.set_nonblocking(true).unwrap();
    TcpListener::from_std(socket.into()).unwrap()
}

/// Sends `bytes` and closes that direction, while it reads to the end; how much that was.
async fn exchange(socket: &mut TcpStream, bytes: usize) -> usize {
    let (mut read, mut write) = socket.split();
    let sending = async {
        write.write_all(&vec![7; bytes]).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let (_sent, read) = tokio::join!(sending, read.read_to_end(&mut received));
    read.unwrap()
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
    accounting
        .until("ends", |now| {
            now.of("connections_total", LABELS, "", "target") == Some(1)
                && now.of("connections_total", client, "", "client") == Some(1)
        })
        .await;
    let bytes = |labels, direction, role| accounting.of("bytes_total", labels, direction, role);
    assert_eq!(bytes(LABELS, "sent", "target"), Some(1_234_567));
    assert_eq!(bytes(LABELS, "received", "target"), Some(70_001));
    assert_eq!(bytes(client, "sent", "client"), Some(70_001));
    assert_eq!(bytes(client, "received", "client"), Some(1_234_567));
    let segments = accounting.of("segments_total", LABELS, "sent", "target");
    assert!(segments > Some(2), "{segments:?}");
    assert_eq!(
        accounting.of("rtt_seconds_count", LABELS, "", "target"),
        Some(1)
    );
    assert_eq!(
        accounting.of("lifetime_seconds_count", LABELS, "", "target"),
        Some(1)
    );
}
