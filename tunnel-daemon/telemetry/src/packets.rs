//! Packets and stream errors by segment and packet type.
//!
//! One atomic add per packet: series are resolved at the first packet of a kind. Peers choose the type number, so only the
//! first [`UNKNOWN_TYPES_MAX`] unknown numbers get a series; the rest share `other`.

use std::sync::{Arc, OnceLock};

use adit_core::wire::packets::PacketType;
use prometheus::{IntCounter, IntCounterVec};

use crate::families::Registrar;
use crate::labels::{Label, Segment, go_code};

/// Limit on distinct unknown packet types with their own series, over all segments.
pub const UNKNOWN_TYPES_MAX: usize = 16;

/// Types with a name: upstream's seven and Adit's four.
const NAMED: &[PacketType] = &[
    PacketType::DialReq,
    PacketType::DialRsp,
    PacketType::CloseReq,
    PacketType::CloseRsp,
    PacketType::Data,
    PacketType::DialCls,
    PacketType::Drain,
    PacketType::Window,
    PacketType::Fin,
    PacketType::Reset,
    PacketType::Keys,
];
/// Index of the series shared by unknown types beyond the bound.
const OTHER: usize = NAMED.len() + UNKNOWN_TYPES_MAX;
const KINDS: usize = OTHER + 1;
const SEGMENTS: usize = Segment::ALL.len();

/// The packet type as a label.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PacketKind {
    /// A type this build knows.
    Known(PacketType),
    /// An unknown number, from a newer or misbehaving peer.
    Unknown(i32),
}

impl From<PacketType> for PacketKind {
    fn from(packet_type: PacketType) -> Self {
        Self::Known(packet_type)
    }
}

impl From<i32> for PacketKind {
    /// From the type number on the wire.
    fn from(number: i32) -> Self {
        PacketType::try_from(number).map_or(Self::Unknown(number), Self::Known)
    }
}

/// Position in [`NAMED`]. Exhaustive, so that a new type breaks the build here.
const fn position_of(known: PacketType) -> usize {
    match known {
        PacketType::DialReq => 0,
        PacketType::DialRsp => 1,
        PacketType::CloseReq => 2,
        PacketType::CloseRsp => 3,
        PacketType::Data => 4,
        PacketType::DialCls => 5,
        PacketType::Drain => 6,
        PacketType::Window => 7,
        PacketType::Fin => 8,
        PacketType::Reset => 9,
        PacketType::Keys => 10,
    }
}

/// `stream_packets_total` and `stream_errors_total` of one process.
#[derive(Clone)]
pub(super) struct StreamFamilies(Arc<Table>);

struct Table {
    packets: IntCounterVec,
    errors: IntCounterVec,
    series: [[OnceLock<IntCounter>; KINDS]; SEGMENTS],
    unknown: [OnceLock<i32>; UNKNOWN_TYPES_MAX],
}

impl StreamFamilies {
    pub(super) fn register(registrar: &Registrar<'_>) -> Self {
        let packets = registrar.counter_vec(
            "stream_packets_total",
            "Count of packets processed, by segment and packet type (example: from_client, DIAL_REQ)",
            &["segment", "packet_type"],
        );
        let errors = registrar.counter_vec(
            "stream_errors_total",
            "Count of gRPC stream errors, by segment, grpc Code, packet type. (example: from_agent, Code.Unavailable, DIAL_RSP)",
            &["segment", "code", "packet_type"],
        );
        Self(Arc::new(Table {
            packets,
            errors,
            series: std::array::from_fn(|_| std::array::from_fn(|_| OnceLock::new())),
            unknown: std::array::from_fn(|_| OnceLock::new()),
        }))
    }

    pub(super) fn counter(&self, segment: Segment) -> PacketCounter {
        PacketCounter {
            table: Arc::clone(&self.0),
            segment,
        }
    }

    pub(super) fn error(&self, segment: Segment, code: tonic::Code, kind: Option<PacketKind>) {
        let text;
        let packet_type = match kind {
            None => "Unknown",
            Some(kind) => {
                text = self.0.text_of(self.0.index_of(kind));
                &text
            }
        };
        self.0
            .errors
            .with_label_values(&[segment.as_str(), go_code(code), packet_type])
            .inc();
    }
}

/// Counts the packets of one segment. Cheap to clone; take one per stream.
#[derive(Clone)]
pub struct PacketCounter {
    table: Arc<Table>,
    segment: Segment,
}

impl PacketCounter {
    /// Counts one packet of this kind.
    pub fn count(&self, kind: impl Into<PacketKind>) {
        let table = &*self.table;
        let index = table.index_of(kind.into());
        table.series[self.segment.index()][index]
            .get_or_init(|| {
                table
                    .packets
                    .with_label_values(&[self.segment.as_str(), &table.text_of(index)])
            })
            .inc();
    }
}

impl std::fmt::Debug for PacketCounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PacketCounter").field(&self.segment).finish()
    }
}

impl Table {
    /// Always below `KINDS`. An unknown number takes the first free index, permanently.
    fn index_of(&self, kind: PacketKind) -> usize {
        let number = match kind {
            PacketKind::Known(known) => return position_of(known),
            PacketKind::Unknown(number) => number,
        };
        self.unknown
            .iter()
            .position(|slot| *slot.get_or_init(|| number) == number)
            .map_or(OTHER, |position| NAMED.len() + position)
    }

    fn text_of(&self, index: usize) -> String {
        if let Some(named) = NAMED.get(index) {
            return named.as_str_name().to_owned();
        }
        let slot = self
            .unknown
            .get(index - NAMED.len())
            .and_then(OnceLock::get);
        slot.map_or_else(|| "other".to_owned(), ToString::to_string)
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    fn families() -> StreamFamilies {
        StreamFamilies::register(&Registrar::new(&Registry::new(), "t_"))
    }

    fn packets(families: &StreamFamilies, segment: &str, packet_type: &str) -> u64 {
        families
            .0
            .packets
            .with_label_values(&[segment, packet_type])
            .get()
    }

    #[test]
    fn named_types_are_counted_under_their_enum_name() {
        let families = families();
        let counter = families.counter(Segment::ToAgent);
        for named in NAMED {
            counter.count(*named);
            assert_eq!(packets(&families, "to_agent", named.as_str_name()), 1);
            assert_eq!(NAMED[position_of(*named)], *named);
        }
        counter.count(4);
        assert_eq!(packets(&families, "to_agent", "DATA"), 2);
        assert_eq!(packets(&families, "from_agent", "DATA"), 0);
    }

    /// Limit (operations): Unknown packet types in metrics | 16, then `other`
    #[test]
    fn unknown_numbers_beyond_the_bound_share_other() {
        let families = families();
        let counter = families.counter(Segment::FromAgent);
        for number in 1_000..1_100 {
            counter.count(number);
        }
        counter.count(1_003);
        counter.count(-7);
        assert_eq!(packets(&families, "from_agent", "1003"), 2);
        assert_eq!(packets(&families, "from_agent", "1015"), 1);
        assert_eq!(packets(&families, "from_agent", "other"), 84 + 1);
        families.error(
            Segment::FromAgent,
            tonic::Code::Internal,
            Some(PacketKind::Unknown(5_555)),
        );
        assert_eq!(
            families
                .0
                .errors
                .with_label_values(&["from_agent", "Internal", "other"])
                .get(),
            1
        );
    }

    #[test]
    fn error_without_a_packet_is_of_type_unknown() {
        let families = families();
        families.error(Segment::FromClient, tonic::Code::Cancelled, None);
        assert_eq!(
            families
                .0
                .errors
                .with_label_values(&["from_client", "Canceled", "Unknown"])
                .get(),
            1
        );
    }
}
