//! kTLS: hands a socket's TLS 1.3 record layer to the kernel, and interprets its records.
//!
//! The kernel only encrypts and decrypts records, with AES-GCM and the given keys. Alerts and handshake messages are
//! received and sent as records of their own type. The caller has completed the handshake and must have read whole records
//! only: the kernel starts at the next byte.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use zeroize::{Zeroize as _, ZeroizeOnDrop, Zeroizing};

use crate::syscall::tls::{self, KeyDirection, Received};

/// Most records encrypted with one key before the pair is reset: few kernels accept new keys. RFC 8446 section 5.5
/// considers 2^24.5 records safe for AES-GCM; with full records this limit is 256 GiB.
const RECORDS_MAX: u32 = 1 << 24;
/// Most bytes of one record.
const RECORD_BYTES: usize = 1 << 14;
/// Fewest bytes that a splice puts into one record, except its last.
const SPLICED_BYTES: usize = 1 << 12;
/// Most consecutive records without payload.
const EMPTY_RECORDS_MAX: u32 = 32;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
const GOOD_BYE: [u8; 2] = [1, 0];
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// Keys of one direction of a TLS 1.3 session with AES-GCM. Debug output masks them; dropping clears them.
pub struct TrafficKeys {
    /// 16 or 32 bytes, for AES-128 or AES-256.
    pub key: Vec<u8>,
    /// The IV that is combined with each record's number.
    pub iv: [u8; 12],
    /// Number of the next record.
    pub sequence: u64,
    /// Records that these keys have encrypted or decrypted.
    pub records: u64,
}

impl TrafficKeys {
    fn info(&self) -> io::Result<Zeroizing<Vec<u8>>> {
        tls::aes_gcm_info(&self.key, self.iv, self.sequence)
    }
}

impl Drop for TrafficKeys {
    fn drop(&mut self) {
        self.key.zeroize();
        self.iv.zeroize();
    }
}

impl ZeroizeOnDrop for TrafficKeys {}

impl fmt::Debug for TrafficKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TrafficKeys(***)")
    }
}

/// Why kTLS could not be enabled on a socket.
#[derive(Debug, thiserror::Error)]
pub enum KernelTlsError {
    /// The socket is unchanged: the owner of the keys can continue in user space.
    #[error("the kernel takes no keys: {0}")]
    Untouched(io::Error),
    /// The kernel encrypts what is sent, but reading is impossible: close the socket.
    #[error("the kernel took the keys of one direction only: {0}")]
    HalfWay(io::Error),
}

/// User-space state of a kTLS socket.
#[derive(Debug)]
pub struct KernelTls {
    /// Records that may still be encrypted.
    records_left: u32,
    /// The kernel refused to splice the next record: a read must return it.
    has_refused: bool,
    tickets: Tickets,
}

/// Progress in a handshake message received after the handshake. Only session tickets are allowed; they are skipped, even
/// across records and reads.
#[derive(Clone, Copy, Debug, Default)]
struct Tickets {
    /// Header of the message: its type, and three bytes of length.
    header: [u8; 4],
    header_bytes: usize,
    /// Bytes left of the message's body.
    left: usize,
}

impl Tickets {
    fn is_at_boundary(&self) -> bool {
        self.header_bytes == 0
    }

    /// # Errors
    /// A message other than a ticket.
    fn skip(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let Some((&first, rest)) = bytes.split_first() {
            if let Some(place) = self.header.get_mut(self.header_bytes) {
                *place = first;
                bytes = rest;
                self.header_bytes += 1;
                let [kind, high, middle, low] = self.header;
                if kind != NEW_SESSION_TICKET {
                    return Err(broken(match kind {
                        KEY_UPDATE => "the peer changed its keys, which kernel TLS does not follow",
                        _ => "an unexpected TLS message",
                    }));
                }
                if self.header_bytes < self.header.len() {
                    continue;
                }
                let length = u32::from_be_bytes([0, high, middle, low]);
                self.left = usize::try_from(length).unwrap_or(usize::MAX);
            } else {
                let now = self.left.min(bytes.len());
                bytes = bytes.get(now..).unwrap_or_default();
                self.left -= now;
            }
            if self.left == 0 && self.header_bytes == self.header.len() {
                self.header_bytes = 0;
            }
        }
        Ok(())
    }
}

/// A direction's keys have reached their record limit.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the connection's keys have sealed as many records as they may")]
pub struct KeysUsedUp;

impl KeysUsedUp {
    /// Whether a pair failed for this reason.
    #[must_use]
    pub fn is_cause_of(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

/// Prepares a connected socket for keys. Until it has keys, the socket works as before.
///
/// # Errors
/// The kernel has no kTLS, or the socket is not a TCP socket connected both ways.
pub fn attach_kernel_tls(socket: &impl AsFd) -> io::Result<()> {
    tls::attach(socket)
}

impl KernelTls {
    /// Sets the keys of both directions on a socket prepared by [`attach_kernel_tls`]. All records sent before must have
    /// been written to the socket, and only whole records may have been read.
    ///
    /// # Errors
    /// See [`KernelTlsError`].
    pub fn start(
        socket: &impl AsFd,
        sending: &TrafficKeys,
        receiving: &TrafficKeys,
    ) -> Result<Self, KernelTlsError> {
        let infos = [sending.info(), receiving.info()];
        let [Ok(out), Ok(into)] = infos else {
            return Err(KernelTlsError::Untouched(ErrorKind::InvalidInput.into()));
        };
        tls::set_keys(socket, KeyDirection::Out, &out).map_err(KernelTlsError::Untouched)?;
        tls::set_keys(socket, KeyDirection::In, &into).map_err(KernelTlsError::HalfWay)?;
        Ok(Self {
            records_left: u32::try_from(sending.records)
                .map_or(0, |sealed| RECORDS_MAX.saturating_sub(sealed)),
            has_refused: false,
            tickets: Tickets::default(),
        })
    }

    /// A splice from the socket has failed. The kernel refuses non-data records. With the same error it refuses, once,
    /// bytes that are not a record; after that it returns nothing.
    pub(crate) fn refused(&mut self, error: &io::Error) {
        self.has_refused |= error.kind() == ErrorKind::InvalidInput;
    }

    /// As the free function of this name; also finds the reason of a refused splice.
    pub(crate) fn receive(&mut self, socket: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
        let has_refused = std::mem::take(&mut self.has_refused);
        receive(socket, into, &mut self.tickets).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock if has_refused => broken("what came is no TLS record"),
            _ => error,
        })
    }

    /// # Errors
    /// [`KeysUsedUp`].
    pub(crate) fn check(&self) -> io::Result<()> {
        if self.records_left == 0 {
            return Err(io::Error::other(KeysUsedUp));
        }
        Ok(())
    }

    /// Counts the bytes of one send.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.count(bytes, RECORD_BYTES);
    }

    /// Counts the bytes of one splice.
    pub(crate) fn spliced(&mut self, bytes: usize) {
        self.count(bytes, SPLICED_BYTES);
    }

    fn count(&mut self, bytes: usize, record_bytes: usize) {
        let records = u32::try_from(bytes / record_bytes + 1).unwrap_or(u32::MAX);
        self.records_left = self.records_left.saturating_sub(records);
    }
}

/// Reads payload; `Ok(0)` is the peer's close_notify. A short read does not mean that the socket is empty.
///
/// # Errors
/// The socket's error; a record that does not authenticate or that kTLS cannot handle; EOF without close_notify.
fn receive(socket: impl AsFd, into: &mut [u8], tickets: &mut Tickets) -> io::Result<usize> {
    let socket = socket.as_fd();
    for _empty in 0..EMPTY_RECORDS_MAX {
        let Received { count, kind } = tls::receive(socket, into)?;
        match meaning(kind, into.get(..count).unwrap_or_default(), tickets)? {
            Meaning::Payload => return Ok(count),
            Meaning::GoodBye => return Ok(0),
            Meaning::Nothing => (),
        }
    }
    Err(broken("too many records without payload"))
}

/// Sends close_notify, which is the half-close. No FIN is sent: the kernel may still hold encrypted bytes, which it would
/// not send after a FIN. The socket has room by then, so the record leaves with this call.
///
/// # Errors
/// `WouldBlock` while the socket has no room; the socket's error.
pub(crate) fn send_close_notify(socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd();
    let mut watched = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
    poll(&mut watched, Some(&Timespec::default()))?;
    let [watched] = watched;
    if watched.revents().is_empty() {
        return Err(ErrorKind::WouldBlock.into());
    }
    tls::send(socket, ALERT, &GOOD_BYE)
}

/// The meaning of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Payload,
    GoodBye,
    /// An empty record, or a session ticket.
    Nothing,
}

fn meaning(kind: Option<u8>, bytes: &[u8], tickets: &mut Tickets) -> io::Result<Meaning> {
    match (kind, bytes) {
        (Some(kind), _) if kind != HANDSHAKE && !tickets.is_at_boundary() => Err(broken(
            "a TLS message that is interrupted by another record",
        )),
        (None, []) => Err(io::Error::new(
            ErrorKind::UnexpectedEof,
            "the connection was cut off: it ended without a close_notify",
        )),
        (Some(APPLICATION_DATA), []) => Ok(Meaning::Nothing),
        (Some(APPLICATION_DATA), _) => Ok(Meaning::Payload),
        // TLS 1.3 ignores the level.
        (Some(ALERT), [_level, 0]) => Ok(Meaning::GoodBye),
        (Some(ALERT), _) => Err(broken("the peer sent a TLS alert")),
        (Some(HANDSHAKE), [_, ..]) => tickets.skip(bytes).map(|()| Meaning::Nothing),
        _ => Err(broken("an unexpected TLS record")),
    }
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// Whether kTLS works: tries a connection on loopback with keys, payload and close_notify.
///
/// # Errors
/// The kernel's error.
pub fn probe_kernel_tls() -> io::Result<()> {
    /// Long enough for a loopback connection.
    const PATIENCE: Duration = Duration::from_secs(5);
    const PAYLOAD: &[u8] = b"probe";
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    // A redirect of this host may send the connection elsewhere, and then no connection comes.
    set_socket_timeout(&listener, Timeout::Recv, Some(PATIENCE))?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    let (other, peer) = listener.accept()?;
    if peer != one.local_addr()? {
        return Err(io::Error::other(
            "another process connected to the loopback port of the kernel TLS probe",
        ));
    }
    let keys = |key: u8| TrafficKeys {
        key: vec![key; 16],
        iv: [key; 12],
        sequence: 0,
        records: 0,
    };
    for (socket, out, into) in [(&one, 1, 2), (&other, 2, 1)] {
        socket.set_read_timeout(Some(PATIENCE))?;
        attach_kernel_tls(socket)?;
        KernelTls::start(socket, &keys(out), &keys(into)).map_err(io::Error::other)?;
    }
    crate::syscall::socket::send(&one, PAYLOAD)?;
    send_close_notify(&one)?;
    let mut buffer = [0; 64];
    let mut none = Tickets::default();
    let count = receive(&other, &mut buffer, &mut none)?;
    if buffer.get(..count) != Some(PAYLOAD) || receive(&other, &mut buffer, &mut none)? != 0 {
        return Err(broken("kernel TLS does not give back what was sent"));
    }
    Ok(())
}

/// Whether a kernel of this release (`uname -r`) splices correctly into kTLS. From 6.5 on a splice of many small pieces could
/// send bytes that were never written; fixed in 6.12.55 and from 6.18 on. On kernels without a known fix bytes are copied.
#[must_use]
pub fn splices_into_kernel_tls(release: &str) -> bool {
    let mut numbers = release
        .split(|letter: char| !letter.is_ascii_digit())
        .map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok);
    let (Some(major), Some(minor)) = (next(), next()) else {
        return false;
    };
    let patch = next().unwrap_or(0);
    match (major, minor) {
        (..6, _) | (6, ..5) => true,
        (6, 12) => patch >= 55,
        (6, 18..) | (7.., _) => true,
        (6, _) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(key: Vec<u8>) -> TrafficKeys {
        TrafficKeys {
            key,
            iv: *b"saltintravec",
            sequence: 0x0102_0304_0506_0708,
            records: 0,
        }
    }

    #[test]
    fn keys_are_laid_out_as_the_kernel_reads_them() {
        for (length, cipher) in [(16, 51_u16), (32, 52)] {
            let info = keys(vec![7; length]).info().unwrap();
            let mut expected = [0x0304_u16.to_ne_bytes(), cipher.to_ne_bytes()].concat();
            expected.extend_from_slice(b"intravec");
            expected.extend_from_slice(&vec![7; length]);
            expected.extend_from_slice(b"salt\x01\x02\x03\x04\x05\x06\x07\x08");
            assert_eq!(*info, expected);
        }
        assert!(keys(vec![7; 24]).info().is_err());
        assert_eq!(format!("{:?}", keys(vec![7; 16])), "TrafficKeys(***)");
    }

    #[test]
    fn non_payload_records_are_skipped_or_end_or_fail_the_stream() {
        let of = |kind, bytes: &[u8]| {
            meaning(kind, bytes, &mut Tickets::default()).map_err(|error| error.kind())
        };
        assert_eq!(of(Some(23), b"x"), Ok(Meaning::Payload));
        assert_eq!(of(Some(23), b""), Ok(Meaning::Nothing));
        assert_eq!(of(Some(22), &[4, 0, 0]), Ok(Meaning::Nothing));
        for level in [1, 2] {
            assert_eq!(of(Some(21), &[level, 0]), Ok(Meaning::GoodBye));
            assert_eq!(of(Some(21), &[level, 20]), Err(ErrorKind::InvalidData));
        }
        for (kind, bytes) in [
            (21, &[][..]),
            (22, &[24, 0, 0, 1, 0]),
            (22, &[]),
            (20, &[1]),
        ] {
            assert_eq!(of(Some(kind), bytes), Err(ErrorKind::InvalidData));
        }
        assert_eq!(of(None, b""), Err(ErrorKind::UnexpectedEof));
    }

    /// However the tickets are split over records and reads.
    #[test]
    fn tickets_are_skipped_and_messages_behind_them_are_refused() {
        let ticket = |bytes: usize| {
            let [.., high, low] = bytes.to_be_bytes();
            [&[4, 0, high, low], &vec![9; bytes][..]].concat()
        };
        let tickets = [ticket(3), ticket(0), ticket(300)].concat();
        let update = [24, 0, 0, 1, 0];
        for size in 1..=tickets.len() {
            let mut state = Tickets::default();
            for part in tickets.chunks(size) {
                assert_eq!(
                    meaning(Some(HANDSHAKE), part, &mut state).unwrap(),
                    Meaning::Nothing
                );
            }
            assert!(state.is_at_boundary(), "{size}");
            let payload = meaning(Some(APPLICATION_DATA), b"x", &mut state).unwrap();
            assert_eq!(payload, Meaning::Payload);
        }
        let both = [&tickets[..], &update].concat();
        let refused = meaning(Some(HANDSHAKE), &both, &mut Tickets::default()).unwrap_err();
        assert!(
            refused.to_string().contains("changed its keys"),
            "{refused}"
        );
        for kind in [ALERT, APPLICATION_DATA] {
            let mut state = Tickets::default();
            meaning(Some(HANDSHAKE), &tickets[..5], &mut state).unwrap();
            assert!(meaning(Some(kind), &[1, 0], &mut state).is_err());
        }
    }

    /// The types clear the keys in `Drop`.
    #[test]
    fn keys_are_cleared_when_they_are_dropped() {
        fn clears(_secret: &impl ZeroizeOnDrop) {}
        let keys = keys(vec![7; 16]);
        clears(&keys);
        clears(&keys.info().unwrap());
    }

    #[test]
    fn keys_are_used_up_by_records_not_by_bytes_alone() {
        let mut tls = KernelTls {
            records_left: 6,
            has_refused: false,
            tickets: Tickets::default(),
        };
        tls.sent(1);
        tls.sent(40_000);
        assert_eq!(tls.records_left, 2);
        tls.spliced(5000);
        let used_up = tls.check().unwrap_err();
        assert!(KeysUsedUp::is_cause_of(&used_up), "{used_up}");
        assert!(!KeysUsedUp::is_cause_of(&broken("something else")));
    }

    #[test]
    fn splice_into_kernel_tls_avoids_broken_kernels() {
        for release in [
            "6.1.0-56-cloud-amd64",
            "6.12.117+deb12-cloud-amd64",
            "6.18.5",
            "7.3.4+deb13-cloud-amd64",
            "5.15.0",
        ] {
            assert!(splices_into_kernel_tls(release), "{release}");
        }
        for release in ["6.5.0", "6.8.0-31-generic", "6.12.54", "6.17.9", "", "six"] {
            assert!(!splices_into_kernel_tls(release), "{release}");
        }
    }
}
