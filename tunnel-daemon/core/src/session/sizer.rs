//! The packet size towards a gRPC client.
//!
//! The Go client library queues ten packets per connection and closes the tunnel if its reader takes none for ten seconds. The
//! library is also ten times faster with large packets. So packets start small. They grow only after the client took more
//! packets within two seconds than its queue holds, and never beyond the bytes taken in these two seconds.

use std::collections::VecDeque;
use std::time::Duration;

use super::Moment;

/// Initial packet size, bytes.
pub const CLIENT_PACKET_MIN_BYTES: usize = 32 * 1024;
/// Largest packet size, bytes.
pub const CLIENT_PACKET_MAX_BYTES: usize = 1024 * 1024;

/// Only packets taken within this time count.
const PROOF_WINDOW: Duration = Duration::from_secs(2);
/// Full packets within the window that prove reading: more than twice the client's queue of ten.
const PROOF_PACKETS: usize = 24;
/// Most records kept, which sets the resolution of the window.
const RECORDS_MAX: usize = 64;
/// Bytes taken closer together than this share a record.
const RECORD_SPAN: Duration = Duration::from_millis(40);

/// Decides the packet size for one client stream.
#[derive(Debug)]
pub struct PacketSizer {
    size: usize,
    taken: VecDeque<(Moment, usize)>,
    sum: usize,
    at_size: usize,
    at_size_since: Moment,
}

impl Default for PacketSizer {
    fn default() -> Self {
        Self {
            size: CLIENT_PACKET_MIN_BYTES,
            taken: VecDeque::new(),
            sum: 0,
            at_size: 0,
            at_size_since: Moment::default(),
        }
    }
}

impl PacketSizer {
    /// The client's transport took a packet of `bytes`.
    pub fn took(&mut self, bytes: usize, now: Moment) {
        self.expire(now);
        let full = self.taken.len() >= RECORDS_MAX;
        match self.taken.back_mut() {
            Some((at, sum)) if full || now.since(*at) < RECORD_SPAN => *sum += bytes,
            _ => self.taken.push_back((now, bytes)),
        }
        self.sum += bytes;
        if now.since(self.at_size_since) > PROOF_WINDOW {
            self.at_size = 0;
            self.at_size_since = now;
        }
        if bytes * 2 > self.size {
            self.at_size += 1;
        }
        if self.at_size >= PROOF_PACKETS && self.size < CLIENT_PACKET_MAX_BYTES {
            self.size = (self.size * 2).min(CLIENT_PACKET_MAX_BYTES);
            self.at_size = 0;
            self.at_size_since = now;
        }
    }

    /// Most payload bytes of the next packet.
    pub fn max_bytes(&mut self, now: Moment) -> usize {
        self.expire(now);
        while self.size > CLIENT_PACKET_MIN_BYTES && self.size > self.sum {
            self.size /= 2;
            self.at_size = 0;
            self.at_size_since = now;
        }
        self.size
    }

    fn expire(&mut self, now: Moment) {
        while let Some((at, bytes)) = self.taken.front() {
            if now.since(*at) <= PROOF_WINDOW {
                return;
            }
            self.sum -= bytes;
            self.taken.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Moment {
        Moment(Duration::from_millis(millis))
    }

    /// Limit (sizes): DATA payload to gRPC clients | 32 KiB, growing to 1 MiB with what the client read in the last 2 s
    #[test]
    fn a_fast_client_reaches_the_maximum() {
        let mut sizer = PacketSizer::default();
        for step in 0..200 {
            let size = sizer.max_bytes(at(step));
            sizer.took(size, at(step));
        }
        assert_eq!(sizer.max_bytes(at(200)), CLIENT_PACKET_MAX_BYTES);
    }

    #[test]
    fn filling_the_queue_does_not_grow_the_packet_size() {
        let mut sizer = PacketSizer::default();
        // The queue and the transport take the first packets at once, then 20 KB/s.
        for _packet in 0..14 {
            sizer.took(CLIENT_PACKET_MIN_BYTES, at(1));
        }
        for second in 1..60 {
            sizer.took(CLIENT_PACKET_MIN_BYTES, at(second * 1600));
            assert_eq!(sizer.max_bytes(at(second * 1600)), CLIENT_PACKET_MIN_BYTES);
        }
    }

    /// Limit (sizes): DATA payload to gRPC clients
    #[test]
    fn packet_size_shrinks_without_recent_reads() {
        let mut sizer = PacketSizer::default();
        for step in 0..200 {
            let size = sizer.max_bytes(at(step));
            sizer.took(size, at(step));
        }
        assert_eq!(sizer.max_bytes(at(10_000)), CLIENT_PACKET_MIN_BYTES);
    }

    #[test]
    fn small_packets_do_not_grow_the_packet_size() {
        let mut sizer = PacketSizer::default();
        for step in 0..1000 {
            sizer.took(64, at(step));
        }
        assert_eq!(sizer.max_bytes(at(1000)), CLIENT_PACKET_MIN_BYTES);
    }
}
