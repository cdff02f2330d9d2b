//! Events of a `Proxy` stream: the interface between its protocol and metrics and logs.

use adit_core::failure::DialFailure;
use adit_core::wire::packet::{PacketType, Violation};

use crate::router::{AskedAgents, OpenTunnel};
use adit_telemetry::labels::EndReason;
use adit_tunnel::Endpoint;

/// Events of a stream. Called inside its task: must not block.
pub trait StreamEvents: Send {
    /// A packet came from the client, in full.
    fn packet_in(&mut self, kind: Result<PacketType, i32>);
    /// A packet was sent to the client.
    fn packet_out(&mut self, kind: PacketType);
    /// The client's packets are not read, since the tunnel takes no more.
    fn held_up(&mut self);
    /// The client's packets are read again.
    fn not_held_up(&mut self);
    /// Reading the stream failed.
    fn read_failed(&mut self, code: tonic::Code);
    /// Writing the stream failed.
    fn write_failed(&mut self, error: &h2::Error);
    /// The answer to the dial could not be sent.
    fn answer_lost(&mut self);
    /// The client broke the protocol.
    fn offence(&mut self, violation: Violation);
    /// A dial starts. The dial records the agents it asks in the returned list.
    fn dialing(&mut self, address: &str) -> AskedAgents;
    /// The dial has an outcome; for a tunnel, the agent that carries it.
    fn dialed(&mut self, outcome: Result<&OpenTunnel, &DialFailure>);
    /// The tunnel's endpoint, before its first byte.
    fn watch(&mut self, endpoint: &mut Endpoint);
    /// The client gave up the dial.
    fn abandoned(&mut self);
    /// The tunnel is over: bytes from and to the client, and why.
    fn ended(&mut self, from_client: u64, to_client: u64, reason: EndReason);
}
