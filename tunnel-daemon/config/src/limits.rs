//! Every limit and timeout that is not a flag, and the defaults and bounds of those that are flags.
//!
//! Units are in the name or the type. Each constant says why it has its value, and relations between constants are asserted at
//! compile time. The core has its own limits for its state.

use std::num::NonZeroU32;
use std::time::Duration;

/// Bytes in one KiB, to keep the table readable.
pub const KIB: u64 = 1024;
/// Bytes in one MiB.
pub const MIB: u64 = 1024 * KIB;

// --- The wire -----------------------------------------------------------------------------------

/// Largest gRPC message sent or accepted, bytes: gRPC-Go's default receive limit (compat W3).
pub const MESSAGE_BYTES_MAX: u64 = 4 * MIB;
/// Limit on a dial's protocol and address together: four times the longest name with its port. No budget counts the memory of
/// pending dials. A longer dial could exceed the message limit of an agent's link, whose loss would end all its tunnels.
pub const DIAL_BYTES_MAX: usize = 1024;

/// Access events per second on average, by default.
pub const ACCESS_LOG_LIMIT: u32 = 100;
/// Dials of a proxy without an answer at once, by default: a fourth of a server's, since it stands beside one component.
pub const PROXY_PENDING_DIALS: u32 = 4096;
/// Connections to servers that a proxy keeps ready at most, by default: each saves a dial two round trips and a handshake.
pub const SPARE_CONNECTIONS: u32 = 4;
/// Time for a dial of HyperShift's sidecars, over all addresses of a name: theirs.
pub const SIDECAR_DIAL_TIMEOUT: Duration = Duration::from_secs(90);
/// Grace of these sidecars: less than the 30 s after which the kubelet kills a pod.
pub const SIDECAR_GRACE: Duration = Duration::from_secs(25);
/// Concurrent calls on one HTTP/2 connection of a client. HTTP/2 counts a call until its answer is sent, so this also bounds
/// the answers queued for a client that does not read. kube-apiserver has one tunnel per connection; Go clients wait at the
/// limit.
pub const CLIENT_STREAMS_MAX: u32 = 4_096;
/// Memory that small DATA frames of one HTTP/2 connection may take beside their payload, as `h2` estimates it: up to 256 bytes
/// per queued frame, so 65,536 frames. Flow control counts payload only.
pub const DATA_FRAME_BUDGET_BYTES: usize = 16 * 1024 * 1024;
/// Bytes of a peer's text that an answer or an error repeats.
pub const EXCERPT_BYTES_MAX: usize = 64;

// --- Deadlines of peers -------------------------------------------------------------------------

/// Time for a TLS handshake: gRPC-Go allows 120 s; a healthy peer needs a few round trips.
pub const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a TLS handshake at listeners in compat mode: as long as upstream waits for slow peers.
pub const TLS_HANDSHAKE_TIMEOUT_COMPAT: Duration = Duration::from_secs(120);
/// Time without a byte after which a new connection may be closed to make room. A TLS client sends its first bytes right behind
/// the ACK that completes its connection. So each connection's task checks for them before the connection may be closed.
pub const SPEAKS_WITHIN: Duration = Duration::from_millis(100);
/// Time that a handshake may wait for its peer before it may be closed to make room. A healthy peer answers within a round trip
/// and a millisecond of CPU time; this suffices for a slow path that loses a packet.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// Time for a client's HTTP/2 preface, its first bytes.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Namespace of leases, upstream's default.
pub const LEASE_NAMESPACE: &str = "kube-system";
/// Label of leases, upstream's default.
pub const LEASE_LABEL: &str = "k8s-app=konnectivity-server";
/// Time for TCP and TLS to a server, all addresses together.
pub const LINK_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// TCP_USER_TIMEOUT on links, and time for the answer to an HTTP/2 ping: both 20 s upstream.
pub const LINK_ACK_TIMEOUT: Duration = Duration::from_secs(20);
/// Time that a gRPC client's call may be without a dial or a tunnel, before its first dial or after its last tunnel. Such a
/// call may hold 16 KiB of a message, and 400,000 of them take every slot. Go clients dial at once and end the call with its
/// tunnel.
pub const CALL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time without progress after which the remaining bytes of a closed tunnel are dropped.
pub const LINGER_TIMEOUT: Duration = Duration::from_secs(30);
/// The Go client's own dial deadline; the server must answer before it.
pub const GO_CLIENT_DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for a refused client to send its request and read the refusal: it holds a descriptor that others need.
pub const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without a dial or a tunnel after which a draining agent leaves: far above the round trip to its servers, during which a
/// dial may cross its DRAIN.
pub const DRAIN_QUIET: Duration = Duration::from_secs(1);
/// Time to send the last CLOSE packets at the end of a shutdown, before sockets are closed.
pub const SHUTDOWN_FLUSH: Duration = Duration::from_secs(1);

// --- Connections before they are authenticated ---------------------------------------------------

/// Concurrent TLS handshakes per listener: each costs about a millisecond of a core.
pub const HANDSHAKES_MAX: usize = 256;
/// Connections of a listener without a byte from their peer. A TLS client sends its first bytes right behind the ACK that
/// completes its connection: with 10,000 silent peers a second it still has a tenth of a second.
pub const SILENT_MAX: usize = 1024;
/// Connections of a listener that wait for a handshake slot: as many as the kernel's backlog would hold.
pub const WAITING_MAX: usize = 4096;
/// Silent connections of a listener take at most 1 / this of the descriptors, and so do waiting ones: even at the lowest
/// descriptor limits, links and tunnels keep their share.
pub const LISTENER_DESCRIPTORS_DIVISOR: u64 = 8;

// --- Defaults of flags --------------------------------------------------------------------------

/// Label sets of kernel accounting: some 40 lines of a scrape each.
pub const ACCOUNT_SERIES: u32 = 100;
/// The highest value of the flag.
pub const ACCOUNT_SERIES_MAX: u32 = 10_000;

/// Dial deadline of the native server: below the Go client's own, so that the client learns the cause.
pub const DIAL_ANSWER_TIMEOUT: Duration = Duration::from_secs(25);
/// Time for a target to accept, over all addresses.
pub const TARGET_DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle time before an HTTP/2 ping, both programs.
pub const KEEPALIVE_TIME: Duration = Duration::from_secs(3600);
/// A link whose agent has been silent for this long gets no dials.
pub const LINK_DEAD_AFTER: Duration = Duration::from_secs(8);
/// Least value of the flag: silence is detected after 4 s.
pub const LINK_DEAD_AFTER_MIN: Duration = Duration::from_secs(5);
/// gRPC-Go's value when a listener's keepalive time is zero or negative.
pub const KEEPALIVE_TIME_UNSET: Duration = Duration::from_secs(7200);
/// Time for the request head of an HTTP-CONNECT client; upstream's value.
pub const CONNECT_HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Shortest time between an agent's pings: Go servers end a link that pings more often (compat 2.3, R8).
pub const AGENT_KEEPALIVE_TIME_MIN: Duration = Duration::from_secs(30);
/// First wait between sync rounds of an agent.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait between sync rounds of an agent.
pub const SYNC_INTERVAL_CAP: Duration = Duration::from_secs(10);
/// Interval between checks of a link's state.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest duration in a flag, a hundred years: such a moment can still be represented.
pub const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// Shortest sync interval: a shorter one would be a busy loop.
pub const INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Packets per receive queue of a server.
pub const SERVER_XFR_CHANNEL_SIZE: u32 = 10;
/// Packets per receive queue of an agent.
pub const AGENT_XFR_CHANNEL_SIZE: u32 = 150;
/// Pending dials of one agent: ten seconds of 100 new tunnels a second, all unanswered.
pub const PENDING_DIALS_PER_AGENT: u32 = 1_024;
/// Links of one principal under one agent id. An agent whose connections die unnoticed and are reopened every second holds
/// about 20 ([`LINK_ACK_TIMEOUT`]); replicas that share an id hold a few.
pub const LINKS_PER_AGENT: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
/// Links of one agent to servers, and the highest announced server count it believes. Each link is a connection with a task,
/// and any process at a server's address can announce a count. Control planes have three to seven servers.
pub const SERVERS_HELD_MAX: usize = 64;
/// Lanes of one link: far above what descriptors allow on most hosts, and a bound for one agent.
pub const LANES_PER_LINK: u32 = 4_096;
/// Pending dials over all agents; a pending dial costs about 1 KiB.
pub const PENDING_DIALS: u32 = 16_384;

// --- Bytes --------------------------------------------------------------------------------------

/// Bytes of its agent's budget that each tunnel may always hold.
pub const TUNNEL_SHARE_BYTES: u64 = 4 * MIB;
/// Smallest share: one packet in each direction with room to coalesce the next.
pub const TUNNEL_SHARE_BYTES_MIN: u64 = 64 * KIB;
/// Bytes held for one agent, over all tunnels.
pub const AGENT_BUDGET_BYTES: u64 = 64 * MIB;
/// Part of the cgroup's memory.max that is the process budget by default: 1 / this.
pub const PROCESS_BUDGET_DIVISOR: u64 = 4;
/// Part of the same memory that the kernel may buffer for one socket of a tunnel in each direction: 1 / this. A tunnel whose
/// reader pauses fills two of a process's sockets, in one direction each.
pub const SOCKET_BUFFER_DIVISOR: u64 = 512;
/// Least such bound, KiB: the kernel's initial receive buffer.
pub const SOCKET_BUFFER_KIB_MIN: u16 = 128;
/// From this bound on, reached with 512 MiB of memory, the kernel's own limits apply.
pub const SOCKET_BUFFER_BOUND_KIB_MAX: u16 = 1024;
/// Memory of a process without tunnels, bytes: no tunnel is promised it.
pub const OWN_BYTES: u64 = 16 * MIB;
/// This part of the memory is promised to nobody: the allocator and the kernel need more than what is counted.
pub const UNPROMISED_DIVISOR: u64 = 10;
/// Where the memory limit covers TCP, lanes get this part of what is promised.
pub const LANES_MEMORY_DIVISOR: u64 = 6;
/// Memory of a lane whose peer sends and that is not read: its first window, as the kernel books it.
pub const LANE_BYTES: u64 = 96 * KIB;
/// Larger buffers of one socket are charged as no more than this, KiB each way: few sockets fill what the kernel would allow.
pub const SOCKET_GROWTH_KIB_MAX: u64 = 512;
/// Part of the same memory that idle blocks of bulk reads may take: 1 / this. In 512 MiB, 64 threads, which would keep 128 MiB,
/// keep 16 MiB.
pub const KEPT_BLOCKS_DIVISOR: u64 = 32;
/// Size limit of the `--config` file.
pub const CONFIG_FILE_BYTES_MAX: u64 = MIB;
/// Time without progress after which a tunnel above its share is closed.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(300);
/// Time without a byte after which a half-closed tunnel is reset.
pub const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(300);

/// Request head of an HTTP-CONNECT client, bytes: the limit of Go's server.
pub const CONNECT_HEAD_BYTES: u64 = MIB;
/// Bytes that a client without packets may always send before its tunnel is open, request head or data: a head has some hundred
/// bytes, and a TLS client's first bytes fit.
pub const UNANSWERED_BYTES_FREE: usize = 16 * 1024;
/// Bytes beyond that of all such clients together.
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
/// Longest unix socket path, bytes: sun_path has 108, including the terminating zero.
pub const UNIX_SOCKET_PATH_BYTES_MAX: usize = 107;
/// Values of --redirect and --redirect-exclude together; the kernel's table also holds the built-in exclusions.
pub const REDIRECT_RULES_MAX: usize = 4096;
/// Size limit of a --redirect-file, bytes: above the size of the maximum number of rules.
pub const REDIRECT_FILE_BYTES_MAX: usize = 1 << 20;
/// Network namespaces that are captured concurrently, besides that of this process.
pub const REDIRECT_NETNS_MAX: usize = 256;
/// Limit on frontend listeners of a server.
pub const FRONTENDS_MAX: usize = 64;
/// Limit on `--target` listeners of an agent.
pub const NODE_LISTENERS_MAX: usize = 64;
/// Limit on `--target-from` networks of an agent: the kernel bounds the filter of a socket.
pub const TARGET_SOURCES_MAX: usize = 16;
/// Limit on server addresses of an agent.
pub const SERVER_ADDRESSES_MAX: usize = 64;
/// Limit on `--peer` addresses of a server, and on its peers: keys of agents keep a set of 64 bits.
pub const PEERS_MAX: usize = 64;
/// Limit on `--peer-network` networks: each address that discovery names is compared with all.
pub const PEER_NETWORKS_MAX: usize = 64;
/// Name of an installation whose servers have no `--peer-group`.
pub const PEER_GROUP: &str = "default";
/// Longest name of an installation, bytes: peers send it in a header.
pub const PEER_GROUP_BYTES_MAX: usize = 64;
/// Servers that agents are linked to while all peers are live, by default: a roll of one server costs no agent its last link.
pub const PEER_AGENT_LINKS: NonZeroU32 = NonZeroU32::new(2).expect("not zero");
/// The highest value of the flag: [`SERVERS_HELD_MAX`], the highest count that agents believe.
pub const PEER_AGENT_LINKS_MAX: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
/// Size at which klog truncates a log file by default, MiB.
pub const LOG_FILE_MIB_MAX: u64 = 1_800;

/// Agents with series of their own for their dials. A scrape has three series for each: more make it slow to read.
pub const METRICS_AGENTS_MAX: u16 = 1000;
/// A dial that an agent answered after more than this time counts as slow: webhooks of kube-apiserver wait 1 s at least.
pub const SLOW_DIAL: Duration = Duration::from_secs(1);

const _: () = assert!(SPEAKS_WITHIN.as_millis() < ANSWERS_WITHIN.as_millis());
const _: () = assert!(ANSWERS_WITHIN.as_secs() < TLS_HANDSHAKE_TIMEOUT.as_secs());
const _: () = assert!(TLS_HANDSHAKE_TIMEOUT.as_secs() <= TLS_HANDSHAKE_TIMEOUT_COMPAT.as_secs());
const _: () = assert!(HANDSHAKES_MAX <= SILENT_MAX && SILENT_MAX <= WAITING_MAX);
const _: () = assert!(DIAL_ANSWER_TIMEOUT.as_secs() < GO_CLIENT_DIAL_TIMEOUT.as_secs());
const _: () = assert!(TARGET_DIAL_TIMEOUT.as_secs() < DIAL_ANSWER_TIMEOUT.as_secs());
const _: () = assert!(SOCKET_BUFFER_KIB_MIN < SOCKET_BUFFER_BOUND_KIB_MAX);
const _: () =
    assert!(SOCKET_BUFFER_BOUND_KIB_MAX as u64 * KIB * SOCKET_BUFFER_DIVISOR == 512 * MIB);
const _: () = assert!(TUNNEL_SHARE_BYTES_MIN <= TUNNEL_SHARE_BYTES);
const _: () = assert!(TUNNEL_SHARE_BYTES <= AGENT_BUDGET_BYTES);
const _: () = assert!(CONNECT_HEAD_BYTES == adit_core::connect::HEAD_LEN_MAX as u64);
const _: () = assert!(SERVER_ADDRESSES_MAX <= SERVERS_HELD_MAX);
const _: () = assert!(PEER_AGENT_LINKS_MAX.get() as usize == SERVERS_HELD_MAX);
const _: () = assert!(PEERS_MAX <= u64::BITS as usize);
const _: () = assert!(CONNECT_HEAD_BYTES < UNANSWERED_BYTES_MAX as u64);
const _: () = assert!(PENDING_DIALS_PER_AGENT <= PENDING_DIALS);
const _: () = assert!(SYNC_INTERVAL.as_millis() <= SYNC_INTERVAL_CAP.as_millis());
const _: () = assert!(AGENT_KEEPALIVE_TIME_MIN.as_secs() <= KEEPALIVE_TIME.as_secs());
