//! One link as one task: its session machine, its HTTP/2 stream, and the channels of its tunnels.
//!
//! The task never waits for an endpoint. It parses what the peer sent, returns HTTP/2 capacity at once, visits the endpoints in
//! the dirty list, and sends while the stream has capacity.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::TunnelKey;
use adit_core::session::{Action, CancelledDial, DialRequest, Event, Link, Moment, Transmit};
use adit_core::wire::decode::Decoder;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::{Packet, PacketType, Received};
use adit_net::grpc::denial_of;
use h2::Reason;
use http::HeaderMap;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Sleep, sleep_until};

use crate::channel::{
    Channel, DirtyList, ENDPOINT_CLOSE, ENDPOINT_END_WAITS, ENDPOINT_FIN, ENDPOINT_GONE,
};
use crate::clock::{instant, moment};
use crate::endpoint::Endpoint;
use crate::pace::{LOOK_AGAIN, Pace};
use crate::task::{Command, DialOutcome, Dialed, LinkExit, LinkHooks, LinkStreams};
use crate::tunnel_slot::TunnelSlot;

/// HTTP/2 frames handled before the link's other work.
const FRAMES_PER_TURN: usize = 32;
/// Turns in one poll, before the task yields.
const TURNS_PER_POLL: usize = 8;
/// Time that a replaced link stays without a tunnel: a dial may be on its way to it.
const FINISH_AFTER: Duration = Duration::from_secs(2);
/// Capacity reserved ahead, so that a packet rarely waits for another grant.
const RESERVE_BYTES: usize = 64 * 1024;

/// The future that is the link task. It completes when the link is over; dropping it resets all tunnels.
pub struct LinkDriver<H: LinkHooks> {
    link: Link,
    streams: LinkStreams,
    decoder: Decoder,
    commands: mpsc::Receiver<Command>,
    dirty_list: Arc<DirtyList>,
    slots: Vec<Option<TunnelSlot>>,
    hooks: H,
    sleep: Pin<Box<Sleep>>,
    sleep_at: Option<Moment>,
    synced_at: Moment,
    pace: Pace,
    paced: bool,
    /// From this moment on the link ends as soon as it has no tunnel.
    finish_at: Option<Moment>,
}

impl<H: LinkHooks> LinkDriver<H> {
    /// Joins a machine to its stream.
    #[must_use]
    pub fn new(
        link: Link,
        streams: LinkStreams,
        commands: mpsc::Receiver<Command>,
        dirty_list: Arc<DirtyList>,
        hooks: H,
    ) -> Self {
        dirty_list.count_in(link.budget());
        link.control_share()
            .wake_by(Waker::from(Arc::clone(&dirty_list)));
        Self {
            link,
            streams,
            decoder: Decoder::default(),
            commands,
            dirty_list,
            slots: Vec::new(),
            hooks,
            sleep: Box::pin(sleep_until(instant(Moment::default()))),
            sleep_at: None,
            synced_at: Moment::default(),
            pace: Pace::default(),
            paced: false,
            finish_at: None,
        }
    }

    /// `Ok`: there is nothing to do until the task is woken.
    fn run(&mut self, cx: &mut Context<'_>) -> Result<(), LinkExit> {
        self.dirty_list.register(cx.waker());
        let generation = self.dirty_list.generation();
        for _turn in 0..TURNS_PER_POLL {
            let now = moment();
            let mut busy = self.poll_peer(cx, now)?;
            busy |= self.poll_commands(cx, now)?;
            busy |= self.visit_endpoints(now);
            self.link.handle_tick(now);
            self.apply(now)?;
            busy |= self.poll_send(cx, now)?;
            self.apply(now)?;
            if !busy && self.dirty_list.is_empty() {
                let is_due = self.finish_at.is_some_and(|at| at <= now);
                if is_due && self.link.tunnels() == 0 {
                    return Err(LinkExit::Replaced);
                }
                self.publish(generation);
                self.arm(cx);
                return Ok(());
            }
        }
        self.publish(generation);
        cx.waker().wake_by_ref();
        Ok(())
    }

    fn publish(&self, generation: u64) {
        let (held, lingering) = (self.link.held_bytes(), self.link.lingering());
        self.dirty_list.publish(held, lingering, generation);
    }

    /// Reads frames until the stream is empty or the turn is over.
    fn poll_peer(&mut self, cx: &mut Context<'_>, now: Moment) -> Result<bool, LinkExit> {
        for frame in 0..FRAMES_PER_TURN {
            self.paced = self.pace.holds(&self.link, now);
            if self.paced {
                self.sync_drained(now);
                return Ok(frame > 0);
            }
            let Poll::Ready(polled) = self.streams.recv.poll_data(cx) else {
                return Ok(frame > 0);
            };
            let Some(data) = polled else {
                self.decoder.finish()?;
                return Err(self.end_of_peer(cx));
            };
            let data = data?;
            // Credit and budgets bound the bytes held. The shared stream's window bounds them only while the link is paced.
            let kept = data.len().min(self.streams.withhold_bytes);
            self.streams.withhold_bytes -= kept;
            self.streams
                .recv
                .flow_control()
                .release_capacity(data.len() - kept)?;
            self.decoder.push(data);
            while let Some(received) = self.decoder.next()? {
                match &received {
                    Received::Packet(packet) if !self.decoder.is_inside_data() => {
                        self.hooks.packet_in(Ok(packet.kind()));
                    }
                    Received::Unknown(number) => self.hooks.packet_in(Err(*number)),
                    Received::Packet(_) | Received::Violation(_) => (),
                }
                match received {
                    Received::Packet(Packet::Keys(keys)) => {
                        if !self.hooks.keys(keys) {
                            self.hooks
                                .count(Event::UnknownType(PacketType::Keys.into()));
                        }
                    }
                    received => self.link.handle_packet(received, now),
                }
                self.apply(now)?;
            }
        }
        Ok(true)
    }

    /// The end of the peer's stream: with a status behind it that says why, or without.
    fn end_of_peer(&mut self, cx: &mut Context<'_>) -> LinkExit {
        match self.streams.recv.poll_trailers(cx) {
            Poll::Ready(Ok(Some(trailers))) => {
                denial_of(&trailers).map_or(LinkExit::Finished, LinkExit::RevokedByPeer)
            }
            Poll::Ready(_) | Poll::Pending => LinkExit::Finished,
        }
    }

    fn poll_commands(&mut self, cx: &mut Context<'_>, now: Moment) -> Result<bool, LinkExit> {
        let mut busy = false;
        while let Poll::Ready(command) = self.commands.poll_recv(cx) {
            busy = true;
            match command {
                Some(Command::Dial {
                    request,
                    channel,
                    reply,
                }) => self.start_dial(request, channel, reply, now),
                Some(Command::Dialed(dialed)) => self.finish_dial(dialed, now),
                Some(Command::Drain) => self.link.drain(),
                Some(Command::Finish) => {
                    self.link.drain();
                    self.finish_at
                        .get_or_insert_with(|| now.after(FINISH_AFTER));
                }
                Some(Command::Revoke(why)) => return Err(LinkExit::Revoked(why)),
                Some(Command::Stop) | None => return Err(LinkExit::Stopped),
            }
        }
        Ok(busy)
    }

    fn start_dial(
        &mut self,
        request: DialRequest,
        channel: Arc<Channel>,
        reply: oneshot::Sender<DialOutcome>,
        now: Moment,
    ) {
        if channel.endpoint_flags() & ENDPOINT_GONE != 0 {
            return;
        }
        match self.link.dial(request, now) {
            Ok(key) => {
                channel.bind(key);
                self.insert(TunnelSlot::new(key, channel, Some(reply)));
            }
            Err(failure) => {
                // The caller may have cancelled the dial; nothing is lost then.
                let _left = reply.send(Err(CancelledDial {
                    failure,
                    written: false,
                }));
            }
        }
    }

    fn finish_dial(&mut self, dialed: Dialed, now: Moment) {
        let Dialed {
            key,
            outcome,
            endpoint,
        } = dialed;
        self.hooks.dial_finished(key);
        if !self.link.dialed(key, outcome, now) {
            return;
        }
        let (end, channel) = Endpoint::new(&self.dirty_list);
        channel.bind(key);
        self.insert(TunnelSlot::new(key, channel, None));
        self.hooks.opened(key);
        // If the dial task is gone, the endpoint is dropped, which closes the tunnel again.
        let _left = endpoint.send(end);
    }

    fn insert(&mut self, slot: TunnelSlot) {
        let index = slot.key.slot as usize;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        if let Some(place) = self.slots.get_mut(index) {
            *place = Some(slot);
        }
    }

    fn slot_of(&mut self, key: TunnelKey) -> Option<&mut TunnelSlot> {
        self.slots
            .get_mut(key.slot as usize)?
            .as_mut()
            .filter(|slot| slot.key == key)
    }

    fn remove(&mut self, key: TunnelKey) -> Option<TunnelSlot> {
        let place = self.slots.get_mut(key.slot as usize)?;
        if place.as_ref().is_some_and(|slot| slot.key == key) {
            place.take()
        } else {
            None
        }
    }

    fn visit_endpoints(&mut self, now: Moment) -> bool {
        let mut busy = false;
        while let Some(channel) = self.dirty_list.take() {
            busy = true;
            channel.begin_visit();
            let Some(key) = channel.key() else { continue };
            // Flags before data, so that data queued before a flag was raised is found.
            let flags = channel.endpoint_flags();
            while let Some(bytes) = channel.take_up() {
                let length = bytes.len();
                if !self.link.endpoint_data(key, bytes) {
                    channel.release_up(length, 1);
                }
            }
            self.link.endpoint_drained(key, channel.drained(), now);
            if let Some(slot) = self.slot_of(key) {
                slot.visited();
            }
            if flags & ENDPOINT_END_WAITS != 0 {
                self.link.endpoint_end_waits(key, now);
            }
            if flags & ENDPOINT_FIN != 0 {
                self.link.endpoint_fin(key, now);
            }
            if flags & ENDPOINT_CLOSE != 0 {
                self.link.endpoint_close(key, channel.close_text(), now);
            }
            if flags & ENDPOINT_GONE != 0 {
                self.link.endpoint_gone(key, now);
                self.remove(key);
            }
        }
        busy
    }

    /// Endpoints report small drained amounts late; before budgets are enforced, ask all of them.
    fn sync_drained(&mut self, now: Moment) {
        if !self.link.is_near_budget() || now.since(self.synced_at).as_millis() < 5 {
            return;
        }
        self.synced_at = now;
        for slot in self.slots.iter().flatten() {
            self.link
                .endpoint_drained(slot.key, slot.channel.drained(), now);
        }
    }

    fn apply(&mut self, now: Moment) -> Result<(), LinkExit> {
        while let Some(action) = self.link.poll_action() {
            match action {
                Action::Deliver { key, bytes } => {
                    if let Some(slot) = self.slot_of(key) {
                        slot.deliver(bytes);
                    }
                    self.sync_drained(now);
                }
                Action::StartDial {
                    key,
                    protocol,
                    address,
                } => {
                    // Answered here: a burst of refusals can exceed the capacity of the command queue.
                    if let Err(text) = self.hooks.start_dial(key, protocol, address) {
                        self.link.dialed(key, Err(text), now);
                    }
                }
                Action::CancelDial { key } => self.hooks.cancel_dial(key),
                Action::DialDone { key, conn } => {
                    self.hooks.opened(key);
                    if let Some(reply) = self.slot_of(key).and_then(|slot| slot.reply.take()) {
                        // If the client has left, its endpoint is dropped, which closes the tunnel again.
                        let _left = reply.send(Ok(conn));
                    }
                }
                Action::DialFailed { key, outcome } => {
                    if let Some(reply) = self.remove(key).and_then(|slot| slot.reply) {
                        let _left = reply.send(Err(outcome));
                    }
                }
                Action::PeerFin { key } => {
                    if let Some(slot) = self.slot_of(key) {
                        slot.peer_fin();
                    }
                }
                Action::Ended { key, end } => {
                    if let Some(slot) = self.slot_of(key) {
                        slot.finish(end);
                    }
                }
                Action::Abort { key, end } => {
                    if let Some(slot) = self.slot_of(key) {
                        slot.channel.abort(&end);
                    }
                }
                Action::PeerDraining => self.hooks.peer_draining(),
                Action::Retired => self.hooks.retired(),
                Action::Revived => self.hooks.revived(),
                Action::Failed(failure) => return Err(failure.into()),
                Action::Count(event) => self.hooks.count(event),
            }
        }
        Ok(())
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, now: Moment) -> Result<bool, LinkExit> {
        let mut busy = false;
        while self.link.wants_transmit() {
            if !self.poll_room(cx)? {
                return Ok(busy);
            }
            let Some(transmit) = self.link.poll_transmit(now) else {
                break;
            };
            busy = true;
            let kind = transmit.kind();
            self.hooks.packet_out(kind);
            let message = match transmit {
                Transmit::Control(packet) => MessageBuf::packet(packet),
                Transmit::Data {
                    key,
                    conn,
                    parts,
                    bytes,
                    pieces,
                } => {
                    if let Some(slot) = self.slot_of(key) {
                        slot.channel.release_up(bytes, pieces);
                    }
                    MessageBuf::data(conn, parts)
                }
            };
            self.send(message, kind)?;
        }
        while self.hooks.has_idle_packet() && self.poll_room(cx)? {
            let Some(packet) = self.hooks.idle_packet() else {
                break;
            };
            busy = true;
            let kind = packet.kind();
            self.hooks.packet_out(kind);
            self.send(MessageBuf::packet(packet), kind)?;
        }
        Ok(busy)
    }

    /// Whether the stream takes a packet now.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Result<bool, LinkExit> {
        // HTTP/2 counts the bytes of its frames only, and those of small ones take more memory there than here.
        if !self.link.control_share().has_room() {
            return Ok(false);
        }
        while self.streams.send.capacity() == 0 {
            self.streams.send.reserve_capacity(RESERVE_BYTES);
            match self.streams.send.poll_capacity(cx) {
                Poll::Ready(Some(granted)) => {
                    granted.map_err(|error| LinkExit::Send { error, kind: None })?;
                }
                Poll::Ready(None) => return Err(LinkExit::Finished),
                Poll::Pending => return Ok(false),
            }
        }
        Ok(true)
    }

    fn send(&mut self, message: MessageBuf, kind: PacketType) -> Result<(), LinkExit> {
        let message = message.counted(self.link.control_share().frame());
        let sent = self.streams.send.send_data(message, false);
        sent.map_err(|error| LinkExit::Send {
            error,
            kind: Some(kind),
        })
    }

    /// Ends this side of the stream after [`LinkExit::Stopped`]: the peer learns that the stream is complete.
    pub fn finish(&mut self) {
        // A stream that is gone needs no end.
        let _gone = self.streams.send.send_data(MessageBuf::empty(), true);
    }

    /// Like [`Self::finish`], with a gRPC status for the caller in `trailers`.
    pub fn finish_with(&mut self, trailers: HeaderMap) {
        let _gone = self.streams.send.send_trailers(trailers);
    }

    /// Waits until the peer has ended its side, too; what it sends meanwhile is dropped.
    pub fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(Ok(data)) = ready!(self.streams.recv.poll_data(cx)) {
            let _gone = self
                .streams
                .recv
                .flow_control()
                .release_capacity(data.len());
        }
        Poll::Ready(())
    }

    fn arm(&mut self, cx: &mut Context<'_>) {
        let check = self.paced.then(|| moment().after(LOOK_AGAIN));
        let finish = self.finish_at.filter(|at| *at > moment());
        let times = [self.link.next_deadline(), check, finish];
        let next = times.into_iter().flatten().min();
        let Some(at) = next else {
            self.sleep_at = None;
            return;
        };
        if self.sleep_at != Some(at) {
            self.sleep_at = Some(at);
            self.sleep.as_mut().reset(instant(at));
        }
        if self.sleep.as_mut().poll(cx).is_ready() {
            self.sleep_at = None;
            cx.waker().wake_by_ref();
        }
    }

    /// Fails pending dials and ends every tunnel, on every way the link can end.
    fn wind_up(&mut self) {
        let now = moment();
        if self.hooks.shutting_down() {
            self.link.shut_down(now);
        } else {
            self.link.lost(now);
        }
        // The link has ended: a failure has no further effect.
        let _over = self.apply(now);
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Dial { reply, .. } = command {
                let outcome = CancelledDial {
                    failure: DialFailure::LinkLost,
                    written: false,
                };
                let _left = reply.send(Err(outcome));
            }
        }
    }
}

impl<H: LinkHooks> Future for LinkDriver<H> {
    type Output = LinkExit;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LinkExit> {
        let this = self.get_mut();
        match this.run(cx) {
            Ok(()) => Poll::Pending,
            Err(over) => {
                if let LinkExit::Failed(_) = over {
                    // Drops the frames that wait for the socket, which an implicit reset would keep.
                    this.streams.send.send_reset(Reason::ENHANCE_YOUR_CALM);
                }
                this.wind_up();
                Poll::Ready(over)
            }
        }
    }
}

impl<H: LinkHooks> Unpin for LinkDriver<H> {}

impl<H: LinkHooks> Drop for LinkDriver<H> {
    fn drop(&mut self) {
        self.wind_up();
        self.dirty_list.close();
    }
}
