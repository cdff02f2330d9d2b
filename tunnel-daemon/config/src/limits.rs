//! Every cap and timeout that is not a flag, and the defaults and bounds of those that are.
//!
//! Units are in the name or the type; each constant says why it has its value, and the relations that
//! must hold between them are asserted at compile time. Core has its own limits for what it holds.

use std::num::NonZeroU32;
use std::time::Duration;

/// Bytes in one KiB, to keep the table readable.
pub const KIB: u64 = 1024;
/// Bytes in one MiB.
pub const MIB: u64 = 1024 * KIB;

// --- The wire -----------------------------------------------------------------------------------

/// Largest gRPC message we send or accept, bytes: gRPC-Go's default receive limit (compat W3).
pub const MESSAGE_BYTES_MAX: u64 = 4 * MIB;
/// Largest DATA payload towards Go agents and servers, bytes: what upstream itself reads at once.
pub const DATA_BYTES_TO_GO: u64 = 32 * KIB;
/// Largest DATA payload towards a gRPC client that keeps up, bytes.
pub const DATA_BYTES_TO_CLIENT_MAX: u64 = MIB;
/// Bytes of what to dial, network name and all: four times the longest name with its port. Dials wait in memory that no budget
/// counts, and a client must not make one that is too long for an agent's link, with which all its tunnels would go.
pub const DIAL_BYTES_MAX: usize = 1024;

/// Access events a second in the long run, unless told otherwise.
pub const ACCESS_LOG_LIMIT: u32 = 100;
/// Calls at once on one HTTP/2 connection of a client. HTTP/2 counts a call until its answer has left, so this also bounds the
/// answers that wait for a client that reads nothing. kube-apiserver has one tunnel a connection; Go clients wait beyond it.
pub const CLIENT_STREAMS_MAX: u32 = 4_096;
/// Memory that small DATA frames of one HTTP/2 connection may take beside their payload, as `h2` estimates it: up to 256 bytes for
/// each frame that waits, so 65,536 of them. Flow control counts payload only.
pub const DATA_FRAME_BUDGET_BYTES: usize = 16 * 1024 * 1024;
/// Bytes of a text of a peer that an answer or an error repeats.
pub const EXCERPT_BYTES_MAX: usize = 64;

// --- Deadlines of peers -------------------------------------------------------------------------

/// Time for a TLS handshake: gRPC-Go allows 120 s, of which a healthy peer needs a few round trips.
pub const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The same at listeners in compat mode, where slow peers are waited for as long as upstream does.
pub const TLS_HANDSHAKE_TIMEOUT_COMPAT: Duration = Duration::from_secs(120);
/// Who has been silent for so long may have to make room for others. A TLS client's first words come right behind the ACK
/// that completes its connection; nobody who was just accepted is sent away before its task had a look.
pub const SPEAKS_WITHIN: Duration = Duration::from_millis(100);
/// Who leaves a handshake waiting for so long may have to make room for others: a healthy peer answers within a round trip and
/// a millisecond of its processor, and this is enough for a slow path that loses a packet.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// Time for the HTTP/2 preface of a client, which is the first thing it says.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Namespace of leases, upstream's default.
pub const LEASE_NAMESPACE: &str = "kube-system";
/// Label of leases, upstream's default.
pub const LEASE_LABEL: &str = "k8s-app=konnectivity-server";
/// Time for TCP and TLS to a server, all addresses together.
pub const LINK_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// TCP_USER_TIMEOUT on links, and the answer time of an HTTP/2 ping: both 20 s upstream.
pub const LINK_ACK_TIMEOUT: Duration = Duration::from_secs(20);
/// Time a gRPC client's call may be without a dial or a tunnel, before its first dial or after its last one: such a call may hold
/// 16 KiB of a message, and 400,000 of them take every place. Go clients dial at once and end the call with its tunnel.
pub const CALL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a tunnel whose peer closed linger this long without progress, then they are dropped.
pub const LINGER_TIMEOUT: Duration = Duration::from_secs(30);
/// The Go client's own dial deadline: ours must answer before it.
pub const GO_CLIENT_DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Time a client that will not be served has to ask and to take the refusal: it holds a descriptor that others need.
pub const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without a dial or a tunnel after which an agent that drains leaves: far above a round trip to its servers and back,
/// within which a dial may have crossed its word.
pub const DRAIN_QUIET: Duration = Duration::from_secs(1);
/// Time to get the last CLOSE packets out once a shutdown is over, before sockets are cut.
pub const SHUTDOWN_FLUSH: Duration = Duration::from_secs(1);

// --- Connections before they are authenticated ---------------------------------------------------

/// TLS handshakes in flight per listener: each costs about a millisecond of a core.
pub const HANDSHAKES_MAX: usize = 256;
/// Connections of a listener whose peer has said nothing yet. The first words of a TLS client come right behind the ACK that
/// completes its connection: with 10,000 silent peers a second it still has a tenth of a second for them.
pub const SILENT_MAX: usize = 1024;
/// Connections of a listener that wait for their handshake: as many as the kernel would hold for it.
pub const WAITING_MAX: usize = 4096;
/// The silent of a listener have at most one descriptor in so many, and so have those that wait: at the lowest limits there
/// are, links and tunnels keep theirs.
pub const LISTENER_DESCRIPTORS_DIVISOR: u64 = 8;

// --- Defaults of flags --------------------------------------------------------------------------

/// Sets of labels of accounting in the kernel: some 40 lines of a scrape each.
pub const ACCOUNT_SERIES: u32 = 100;
/// The most a flag may ask for.
pub const ACCOUNT_SERIES_MAX: u32 = 10_000;

/// Dial deadline of the native server: under the Go client's own, so the client learns the cause.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(25);
/// Time an agent gives a target to accept, all addresses together.
pub const TARGET_DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Grace of the native programs: under Kubernetes' 30 s between SIGTERM and SIGKILL.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(25);
/// Idle time before an HTTP/2 ping, both programs.
pub const KEEPALIVE_TIME: Duration = Duration::from_secs(3600);
/// A link whose agent has been silent for this long gets no dials.
pub const LINK_DEAD_AFTER: Duration = Duration::from_secs(8);
/// The least that may be set: silence is noticed after 4 s.
pub const LINK_DEAD_AFTER_MIN: Duration = Duration::from_secs(5);
/// What gRPC-Go uses when a listener's keepalive time is zero or negative.
pub const KEEPALIVE_TIME_UNSET: Duration = Duration::from_secs(7200);
/// Time for the request head of an HTTP-CONNECT client: upstream's.
pub const CONNECT_HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Shortest time between an agent's pings: Go servers end a link that pings more often (compat 2.3, R8).
pub const AGENT_KEEPALIVE_TIME_MIN: Duration = Duration::from_secs(30);
/// First wait between sync rounds of an agent.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait between sync rounds of an agent.
pub const SYNC_INTERVAL_CAP: Duration = Duration::from_secs(10);
/// Wait between two looks at the state of a link.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time a flag may name, a hundred years: a moment that far ahead can still be told.
pub const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// Shortest sync interval: below it the flag is a busy loop, not a configuration.
pub const INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Packets per receive queue of a server.
pub const SERVER_XFR_CHANNEL_SIZE: u32 = 10;
/// Packets per receive queue of an agent.
pub const AGENT_XFR_CHANNEL_SIZE: u32 = 150;
/// Dials one agent may owe an answer to: ten seconds of 100 new tunnels a second, all unanswered.
pub const PENDING_DIALS_PER_AGENT: u32 = 1_024;
/// Links one principal may hold under one agent id: an agent whose connections die unnoticed and come back every
/// second holds about 20 ([`LINK_ACK_TIMEOUT`]), replicas that share an id a few.
pub const LINKS_PER_AGENT: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
/// Links of one agent to servers, and the most servers it believes there are: each is a connection with a task, and a count comes from
/// whatever answers at a server's address. Control planes have three to seven servers.
pub const SERVERS_HELD_MAX: usize = 64;
/// Lanes of one link: far above what descriptors allow on most hosts, and a bound on what one agent may take.
pub const LANES_PER_LINK: u32 = 4_096;
/// Dials in flight over all agents; a pending dial costs about 1 KiB.
pub const PENDING_DIALS: u32 = 16_384;

// --- Bytes --------------------------------------------------------------------------------------

/// What a tunnel owns of its agent's budget, bytes.
pub const TUNNEL_SHARE_BYTES: u64 = 4 * MIB;
/// Smallest share: one packet of each direction with room to coalesce the next.
pub const TUNNEL_SHARE_BYTES_MIN: u64 = 64 * KIB;
/// Bytes held for one agent, all tunnels together.
pub const AGENT_BUDGET_BYTES: u64 = 64 * MIB;
/// Share of the cgroup's memory.max that is the process budget when no flag says otherwise: 1 / this.
pub const PROCESS_BUDGET_DIVISOR: u64 = 4;
/// Share of the same memory that the kernel may book for one socket of a tunnel each way: 1 / this. A tunnel whose reader
/// pauses fills two of a process's sockets, one way each.
pub const SOCKET_BUFFER_DIVISOR: u64 = 512;
/// But so many KiB, which the kernel gives a new socket for receiving.
pub const SOCKET_BUFFER_KIB_MIN: u16 = 128;
/// Where that share is so many KiB or more, from 512 MiB of memory on, the kernel decides.
pub const SOCKET_BUFFER_BOUND_KIB_MAX: u16 = 1024;
/// Share of the same memory that blocks of bulk reads may take while nobody uses them: 1 / this. In 512 MiB 64 threads, which would
/// keep 128 MiB, keep 16.
pub const KEPT_BLOCKS_DIVISOR: u64 = 32;
/// Longest file of `--config`.
pub const CONFIG_FILE_BYTES_MAX: u64 = MIB;
/// Over its own share without progress for this long: closed.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(300);
/// Half-closed and not a byte for this long: reset.
pub const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(300);

/// Request head of an HTTP-CONNECT client, bytes: what Go's server takes.
pub const CONNECT_HEAD_BYTES: u64 = MIB;
/// Bytes that a client without packets may always have here before its tunnel is open, request head or data: a head has some hundred
/// bytes, and a TLS client's first words fit.
pub const UNANSWERED_BYTES_FREE: usize = 16 * 1024;
/// What all such clients may have here beyond that, together, bytes.
pub const UNANSWERED_BYTES_MAX: usize = 64 * 1024 * 1024;

// --- Ports and files ----------------------------------------------------------------------------

/// Smallest port the upstream server accepts in its flags.
pub const COMPAT_PORT_MIN: i64 = 1024;
/// Largest port the upstream server accepts in its flags: the last one before the ephemeral range.
pub const COMPAT_PORT_MAX: i64 = 49_151;
/// Agent port of a server.
pub const AGENT_PORT: u16 = 8091;
/// TCP frontend port of the upstream server.
pub const FRONTEND_PORT: u16 = 8090;
/// Health and metrics port of a server.
pub const SERVER_HEALTH_PORT: u16 = 8092;
/// Admin port of a server.
pub const SERVER_ADMIN_PORT: u16 = 8095;
/// Health and metrics port of an agent.
pub const AGENT_HEALTH_PORT: u16 = 8093;
/// Admin port of an agent.
pub const AGENT_ADMIN_PORT: u16 = 8094;
/// umask around the creation of a frontend's unix socket.
pub const UNIX_SOCKET_UMASK: u32 = 0o007;
/// The mode that umask leaves.
pub const UNIX_SOCKET_MODE: u32 = 0o770;
/// Longest unix socket path, bytes: sun_path is 108 with its terminating zero.
pub const UNIX_SOCKET_PATH_BYTES_MAX: usize = 107;
/// Values of --redirect and --redirect-exclude together; the table in the kernel also holds what is always left alone.
pub const REDIRECT_RULES_MAX: usize = 4096;
/// Bytes of a --redirect-file: above what as many rules as allowed take.
pub const REDIRECT_FILE_BYTES_MAX: usize = 1 << 20;
/// Network namespaces besides our own that are captured at once.
pub const REDIRECT_NETNS_MAX: usize = 256;
/// Listeners a server may be given as frontends.
pub const FRONTENDS_MAX: usize = 64;
/// Listeners an agent may be given with `--target`.
pub const NODE_LISTENERS_MAX: usize = 64;
/// Server addresses an agent may be given.
pub const SERVER_ADDRESSES_MAX: usize = 64;
/// Size at which klog truncates a log file when no flag says otherwise, MiB.
pub const LOG_FILE_MIB_MAX: u64 = 1_800;

const _: () =
    assert!(DATA_BYTES_TO_GO < MESSAGE_BYTES_MAX && DATA_BYTES_TO_CLIENT_MAX < MESSAGE_BYTES_MAX);
const _: () = assert!((DIAL_BYTES_MAX as u64) < DATA_BYTES_TO_GO);
const _: () = assert!(SPEAKS_WITHIN.as_millis() < ANSWERS_WITHIN.as_millis());
const _: () = assert!(ANSWERS_WITHIN.as_secs() < TLS_HANDSHAKE_TIMEOUT.as_secs());
const _: () = assert!(TLS_HANDSHAKE_TIMEOUT.as_secs() <= TLS_HANDSHAKE_TIMEOUT_COMPAT.as_secs());
const _: () = assert!(HANDSHAKES_MAX <= SILENT_MAX && SILENT_MAX <= WAITING_MAX);
const _: () = assert!(DIAL_TIMEOUT.as_secs() < GO_CLIENT_DIAL_TIMEOUT.as_secs());
const _: () = assert!(TARGET_DIAL_TIMEOUT.as_secs() < DIAL_TIMEOUT.as_secs());
const _: () = assert!(SOCKET_BUFFER_KIB_MIN < SOCKET_BUFFER_BOUND_KIB_MAX);
const _: () =
    assert!(SOCKET_BUFFER_BOUND_KIB_MAX as u64 * KIB * SOCKET_BUFFER_DIVISOR == 512 * MIB);
const _: () = assert!(TUNNEL_SHARE_BYTES_MIN >= 2 * DATA_BYTES_TO_GO);
const _: () = assert!(TUNNEL_SHARE_BYTES_MIN <= TUNNEL_SHARE_BYTES);
const _: () = assert!(TUNNEL_SHARE_BYTES <= AGENT_BUDGET_BYTES);
const _: () = assert!(CONNECT_HEAD_BYTES == adit_core::connect::HEAD_LEN_MAX as u64);
const _: () = assert!(SERVER_ADDRESSES_MAX <= SERVERS_HELD_MAX);
const _: () = assert!(CONNECT_HEAD_BYTES < UNANSWERED_BYTES_MAX as u64);
const _: () = assert!(PENDING_DIALS_PER_AGENT <= PENDING_DIALS);
const _: () = assert!(SYNC_INTERVAL.as_millis() <= SYNC_INTERVAL_CAP.as_millis());
const _: () = assert!(AGENT_KEEPALIVE_TIME_MIN.as_secs() <= KEEPALIVE_TIME.as_secs());
const _: () = assert!(UNIX_SOCKET_MODE == 0o777 & !UNIX_SOCKET_UMASK);
const _: () = assert!(SHUTDOWN_FLUSH.as_secs() + DRAIN_QUIET.as_secs() < SHUTDOWN_GRACE.as_secs());
