//! One step of a link's session, with many tunnels open: bytes from the peer to a leg, bytes of a leg to the peer.

use std::sync::Arc;
use std::time::Duration;

use adit_core::ids::{ConnId, DialId, TunnelKey};
use adit_core::session::{
    Action, DialRequest, Isolation, Link, LinkConfig, Moment, ProcessBudget, Role, Transmit,
};
use adit_core::wire::packet::{Packet, Received};
use bytes::Bytes;

use crate::operation::Operation;

/// Open tunnels.
const TUNNELS: [usize; 2] = [1, 1_000];
/// What a leg or a peer hands over at a time.
const PIECE_BYTES: usize = 4 << 10;

/// A server's end of a link without credit, as with a Go agent, and its open tunnels.
fn open(count: usize) -> (Link, Vec<(TunnelKey, ConnId)>) {
    let config = LinkConfig {
        role: Role::Server,
        credit: false,
        packet_bytes_max: 32 << 10,
        dials_max: 2_000,
        dial_timeout: Some(Duration::from_secs(25)),
        isolation: Isolation::default(),
        control_max: 4_096,
    };
    let mut link = Link::new(config, Arc::new(ProcessBudget::new(1 << 30)), "peer".into());
    let mut tunnels = Vec::new();
    for number in 1_i64.. {
        if tunnels.len() == count {
            break;
        }
        let request = DialRequest {
            dial: DialId(number),
            spare: DialId(-number),
            protocol: "tcp".to_owned(),
            address: "10.0.0.1:443".to_owned(),
        };
        let key = link.dial(request, Moment::default()).expect("room");
        while link.poll_transmit(Moment::default()).is_some() {}
        let answer = Packet::DialRsp {
            dial: DialId(number),
            conn: ConnId(number),
            error: String::new(),
            window: 0,
        };
        link.handle_packet(Received::Packet(answer), Moment::default());
        while link.poll_action().is_some() {}
        tunnels.push((key, ConnId(number)));
    }
    (link, tunnels)
}

/// All of this file.
pub(super) fn operations() -> impl Iterator<Item = Operation> {
    TUNNELS.into_iter().flat_map(|count| {
        [
            Operation::new("session", "peer-to-leg", move || peer_to_leg(count)),
            Operation::new("session", "leg-to-peer", move || leg_to_peer(count)),
        ]
        .map(|operation| operation.with(count))
    })
}

fn peer_to_leg(count: usize) -> impl FnMut() {
    let bytes = Bytes::from(vec![7; PIECE_BYTES]);
    let (mut link, tunnels) = open(count);
    let mut drained = vec![0; count];
    let mut at = 0;
    move || {
        let (key, conn) = tunnels[at];
        let data = Packet::Data {
            conn,
            bytes: bytes.clone(),
        };
        link.handle_packet(Received::Packet(data), Moment::default());
        let action = link.poll_action();
        assert!(matches!(action, Some(Action::Deliver { .. })), "{action:?}");
        drained[at] += PIECE_BYTES as u64;
        link.endpoint_drained(key, drained[at], Moment::default());
        at = (at + 1) % count;
    }
}

fn leg_to_peer(count: usize) -> impl FnMut() {
    let bytes = Bytes::from(vec![7; PIECE_BYTES]);
    let (mut link, tunnels) = open(count);
    let mut at = 0;
    move || {
        let (key, _conn) = tunnels[at];
        link.budget().queue(bytes.len() as u64);
        assert!(link.endpoint_data(key, bytes.clone()), "the tunnel is open");
        let next = link.poll_transmit(Moment::default());
        assert!(matches!(next, Some(Transmit::Data { .. })), "{next:?}");
        at = (at + 1) % count;
    }
}
