//! Options of TCP sockets. Each function takes any socket type and does one thing.

use std::{io, os::fd::AsFd, time::Duration};

use socket2::{SockRef, TcpKeepalive};

/// Idle time before the first keepalive probe, and the time between probes: the default of Go's net package, which
/// upstream's listeners and target sockets have.
pub const KEEPALIVE_PERIOD: Duration = Duration::from_secs(15);
/// Probes without an answer before the connection is given up: also Go's default.
pub const KEEPALIVE_PROBES: u32 = 9;
/// How long the peer of a lane may be silent before the connection is given up.
pub const LANE_SILENCE_MAX: Duration = Duration::from_secs(20);
/// Time between the probes of links and lanes once one is unanswered. Short, so that several probes have to be lost before
/// a living peer is given up, even with a short timeout.
const PROBE_AGAIN: Duration = Duration::from_secs(1);
/// Probes of a lane without an answer within [`LANE_SILENCE_MAX`].
const LANE_PROBES: u32 = 5;

/// What every accepted and every target socket gets: no Nagle delay, keepalive as in Go.
///
/// # Errors
/// The socket is no TCP socket, or already reset.
pub fn tune_stream(socket: &impl AsFd) -> io::Result<()> {
    set_nodelay(socket)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_PERIOD)
        .with_interval(KEEPALIVE_PERIOD)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

/// What a link gets at both ends: as [`tune_stream`], but the connection dies when nothing written, probes included, is
/// acknowledged for `timeout`. For links only: it also kills living peers that merely do not read.
///
/// With such a timeout Linux ignores the number of probes (`tcp_keepalive_timer`, "elapsed >= user_timeout"): with
/// upstream's 15 s between probes, one lost probe would end a link of 20 s.
///
/// # Errors
/// As [`tune_stream`].
pub fn tune_link(socket: &impl AsFd, timeout: Duration) -> io::Result<()> {
    tune_stream(socket)?;
    let socket = SockRef::from(socket);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_interval(PROBE_AGAIN))?;
    socket.set_tcp_user_timeout(Some(timeout))
}

/// Starts keepalive probes after `idle`; [`tune_link`] sets their interval.
///
/// # Errors
/// As [`tune_stream`].
pub fn probe_after(socket: &impl AsFd, idle: Duration) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(idle);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

/// What a lane gets at both ends: as [`tune_stream`], but a lost peer is noticed within [`LANE_SILENCE_MAX`] while nothing
/// is in flight. No TCP_USER_TIMEOUT: it would also end peers that merely do not read.
pub fn tune_lane(socket: &impl AsFd) {
    let keepalive = TcpKeepalive::new()
        .with_time(LANE_SILENCE_MAX - PROBE_AGAIN * LANE_PROBES)
        .with_interval(PROBE_AGAIN)
        .with_retries(LANE_PROBES);
    let keepalive = SockRef::from(socket).set_tcp_keepalive(&keepalive);
    if let Err(error) = set_nodelay(socket).and(keepalive) {
        tracing::debug!(%error, "cannot tune a lane");
    }
}

/// The connection dies when nothing written is acknowledged for `limit`; `None`: as the kernel does. While the peer has something
/// to answer: it also ends peers that merely do not read.
///
/// # Errors
/// As [`tune_stream`].
pub fn set_acknowledged_within(socket: &impl AsFd, limit: Option<Duration>) -> io::Result<()> {
    SockRef::from(socket).set_tcp_user_timeout(limit)
}

/// Disables Nagle's algorithm: small writes leave at once.
///
/// # Errors
/// As [`tune_stream`].
pub fn set_nodelay(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_tcp_nodelay(true)
}

/// Closing the socket will send RST instead of FIN and discard what is unsent.
///
/// # Errors
/// As [`tune_stream`].
pub fn set_reset_on_close(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_linger(Some(Duration::ZERO))
}

/// Closing the socket will send unsent data and FIN, the default.
///
/// # Errors
/// As [`tune_stream`].
pub fn set_end_on_close(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_linger(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn stream() -> TcpStream {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    }

    /// Limit (times): A link whose sent bytes are not acknowledged | ends after 20 s
    #[test]
    fn options_reach_the_kernel() {
        let stream = stream();
        tune_stream(&stream).unwrap();
        set_reset_on_close(&stream).unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEPALIVE_PERIOD);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), KEEPALIVE_PERIOD);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), KEEPALIVE_PROBES);
        assert_eq!(socket.tcp_user_timeout().unwrap(), None);
        assert_eq!(socket.linger().unwrap(), Some(Duration::ZERO));
        set_end_on_close(&stream).unwrap();
        assert_eq!(socket.linger().unwrap(), None);
    }

    /// Up to four keepalive probes may be lost before the peer counts as dead after 20 s.
    #[test]
    fn links_and_lanes_end_after_several_lost_keepalive_probes() {
        const TIMEOUT: Duration = Duration::from_secs(20);
        let (link, lane) = (stream(), stream());
        tune_link(&link, TIMEOUT).unwrap();
        tune_lane(&lane);
        for socket in [SockRef::from(&link), SockRef::from(&lane)] {
            assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
            let time = socket.tcp_keepalive_time().unwrap();
            let interval = socket.tcp_keepalive_interval().unwrap();
            assert_eq!(time + interval * 5, TIMEOUT);
        }
        let (link, lane) = (SockRef::from(&link), SockRef::from(&lane));
        assert_eq!(link.tcp_user_timeout().unwrap(), Some(TIMEOUT));
        assert_eq!(lane.tcp_user_timeout().unwrap(), None);
        assert_eq!(lane.tcp_keepalive_retries().unwrap(), 5);
    }
}
