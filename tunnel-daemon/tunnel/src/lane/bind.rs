//! The greeting that binds a new lane to its link, over TLS with certificates on both ends.

use std::fmt;
use std::time::Duration;

use adit_core::ids::{LinkId, ServerId};
use adit_core::lane::{
    ALPN, Bind, FrameReader, Greeting, Hello, LaneRole, LaneViolation, NONCE_BYTES, OutFrame,
    Piece, Proof, proof_input,
};
use adit_core::wire::metadata::LANE_SECRET_BYTES;
use aws_lc_rs::hmac;
use bytes::{BufMut as _, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use zeroize::Zeroizing;

use crate::lane::connection::Lane;
use crate::lane::transport::Transport;
use adit_config::plan::LaneSecurity;
use adit_tls::records::TakeOverError;
use adit_tls::stream::{ByteStream, TlsConnection};

/// Time from the end of the TLS handshake to READY.
const DEADLINE: Duration = Duration::from_secs(5);
/// Label of the keying material both ends put into the proof (RFC 5705; experimental range).
const EXPORTER_LABEL: &[u8] = b"EXPORTER-adit-lane-1";

/// A secret shared by the two ends of one link. Dropping it clears its memory.
#[derive(Clone)]
pub struct LinkSecret(Zeroizing<[u8; LANE_SECRET_BYTES]>);

impl LinkSecret {
    /// A new random secret.
    #[must_use]
    pub fn random() -> Self {
        Self(Zeroizing::new(rand::random()))
    }

    /// A secret received from the server.
    #[must_use]
    pub fn new(bytes: Zeroizing<[u8; LANE_SECRET_BYTES]>) -> Self {
        Self(bytes)
    }

    /// The secret's bytes, to be sent over the link.
    #[must_use]
    pub fn reveal(&self) -> Zeroizing<[u8; LANE_SECRET_BYTES]> {
        self.0.clone()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0[..])
    }
}

impl fmt::Debug for LinkSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LinkSecret(***)")
    }
}

/// The link that a lane is bound to.
#[derive(Clone, Debug)]
pub struct BindTo {
    /// The link's id, assigned by the server.
    pub link: LinkId,
    /// The link's secret.
    pub secret: LinkSecret,
}

/// Why a connection did not become a lane.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The peer closed the connection.
    #[error("the peer closed the connection before the lane was bound")]
    Closed,
    /// The lane was not bound in time.
    #[error("not bound within {} s", DEADLINE.as_secs())]
    TimedOut,
    /// The peer broke the protocol.
    #[error("{0}")]
    Violation(#[from] LaneViolation),
    /// ALPN selected another protocol or none, or the connection is not TLS.
    #[error("the peer does not speak {ALPN}")]
    NotALane,
    /// TLS exports no keying material to bind the proof to.
    #[error("no keying material: {0}")]
    Exporter(#[from] rustls::Error),
    /// The TLS session cannot be used for a lane.
    #[error(transparent)]
    TakeOver(#[from] TakeOverError),
    /// Agent: the server wants to go on in clear text, which this agent does not allow.
    #[error("the server would go on in clear text, which this agent does not want")]
    Plaintext,
    /// Server: no such link, or a link of another agent.
    #[error("no link of that number takes lanes of this agent")]
    NoLink,
    /// Server: the link or the process has reached its limit of lanes.
    #[error("the limit of lanes is reached")]
    Full,
    /// Server: the proof is not valid.
    #[error("the agent's proof for the lane is not valid")]
    Proof,
    /// Agent: another server answered, and there is no link to that server.
    #[error("the connection led to server {0}, to which this agent has no link with lanes")]
    OtherServer(ServerId),
}

/// The server's part. `find` returns the secret of a link, if the peer of this connection may bind a lane to it now. `security`
/// is what this end supports.
///
/// # Errors
/// See [`BindError`]; the connection is closed then. A cancelled call closes it, too.
pub async fn greet_agent(
    stream: ByteStream,
    server: &ServerId,
    security: LaneSecurity,
    find: impl FnOnce(LinkId) -> Result<LinkSecret, BindError>,
) -> Result<(LinkId, Lane), BindError> {
    within(async {
        let mut greeter = Greeter::new(stream)?;
        let hello = Hello {
            server: server.clone(),
            nonce: rand::random::<[u8; NONCE_BYTES]>(),
        };
        greeter.send(&hello.to_frame()).await?;
        let Greeting::Bind(bind) = greeter.receive().await? else {
            return Err(BindError::NotALane);
        };
        let Bind { link, proof, .. } = bind;
        let secret = find(link)?;
        let input = greeter.proof_input(&hello, link)?;
        hmac::verify(&secret.key(), &input, &proof).map_err(|_wrong| BindError::Proof)?;
        let agreed = Agreed {
            clear: bind.clear && security == LaneSecurity::Plaintext,
            kernel_tls: bind.kernel_tls && greeter.may_use_kernel_tls(security),
        };
        let ready = Greeting::ready_frame(agreed.clear, agreed.kernel_tls);
        greeter.send(&ready).await?;
        Ok((link, greeter.into_lane(LaneRole::Server, agreed).await?))
    })
    .await
}

/// The agent's part. `choose` returns this agent's link to the server that answered, which behind a load balancer may not be
/// the intended one. `security` is what this end supports.
///
/// # Errors
/// See [`BindError`]; the connection is closed then. A cancelled call closes it, too.
pub async fn bind_to_server<T>(
    stream: ByteStream,
    security: LaneSecurity,
    choose: impl FnOnce(&ServerId) -> Option<(BindTo, T)>,
) -> Result<(T, Lane), BindError> {
    within(async {
        let mut greeter = Greeter::new(stream)?;
        let Greeting::Hello(hello) = greeter.receive().await? else {
            return Err(BindError::NotALane);
        };
        let Some((to, chosen)) = choose(&hello.server) else {
            return Err(BindError::OtherServer(hello.server));
        };
        let input = greeter.proof_input(&hello, to.link)?;
        let tag = hmac::sign(&to.secret.key(), &input);
        let proof = Proof::try_from(tag.as_ref()).map_err(|_length| BindError::Proof)?;
        let bind = Bind {
            link: to.link,
            proof,
            clear: security == LaneSecurity::Plaintext,
            kernel_tls: greeter.may_use_kernel_tls(security),
        };
        greeter.send(&bind.to_frame()).await?;
        let Greeting::Ready { clear, kernel_tls } = greeter.receive().await? else {
            return Err(BindError::NotALane);
        };
        if clear && security != LaneSecurity::Plaintext {
            return Err(BindError::Plaintext);
        }
        let agreed = Agreed {
            clear,
            // Only what this end offered: kernel TLS that the server announces without an offer is ignored.
            kernel_tls: kernel_tls && bind.kernel_tls,
        };
        Ok((chosen, greeter.into_lane(LaneRole::Agent, agreed).await?))
    })
    .await
}

async fn within<T>(greeting: impl Future<Output = Result<T, BindError>>) -> Result<T, BindError> {
    tokio::time::timeout(DEADLINE, greeting)
        .await
        .unwrap_or(Err(BindError::TimedOut))
}

/// What both ends agreed on.
#[derive(Clone, Copy)]
struct Agreed {
    clear: bool,
    kernel_tls: bool,
}

struct Greeter {
    stream: ByteStream,
    frames: FrameReader,
}

impl Greeter {
    fn new(stream: ByteStream) -> Result<Self, BindError> {
        if stream.alpn() != Some(ALPN.as_bytes()) {
            return Err(BindError::NotALane);
        }
        let frames = FrameReader::default();
        Ok(Self { stream, frames })
    }

    fn may_use_kernel_tls(&self, security: LaneSecurity) -> bool {
        let tls = self.stream.as_tls();
        security == LaneSecurity::Ktls && tls.is_some_and(TlsConnection::is_aes_gcm)
    }

    fn proof_input(&self, hello: &Hello, link: LinkId) -> Result<Zeroizing<Vec<u8>>, BindError> {
        let tls = self.stream.as_tls().ok_or(BindError::NotALane)?;
        let mut exported = Zeroizing::new([0_u8; 32]);
        tls.export_keying_material(EXPORTER_LABEL, &hello.nonce, &mut exported[..])?;
        Ok(Zeroizing::new(proof_input(hello, link, &exported)))
    }

    async fn send(&mut self, frame: &OutFrame) -> Result<(), BindError> {
        self.stream.write_all(&frame.to_bytes()).await?;
        Ok(self.stream.flush().await?)
    }

    async fn receive(&mut self) -> Result<Greeting, BindError> {
        loop {
            match self.frames.next_piece()? {
                Some(Piece::Frame(header, payload)) => {
                    return Ok(Greeting::read(header, payload)?);
                }
                Some(Piece::Data { .. } | Piece::Unknown(_)) => return Err(BindError::NotALane),
                None => self.read().await?,
            }
        }
    }

    async fn read(&mut self) -> Result<(), BindError> {
        // Not a byte more: TLS decrypts whole records, and records may end after this frame.
        let mut buffer = BytesMut::new().limit(self.frames.wanted_bytes());
        if self.stream.read_buf(&mut buffer).await? == 0 {
            return Err(BindError::Closed);
        }
        self.frames.push(buffer.into_inner().freeze());
        Ok(())
    }

    /// What was read behind READY belongs to the lane.
    async fn into_lane(mut self, role: LaneRole, agreed: Agreed) -> Result<Lane, BindError> {
        let ByteStream::Tls(mut tls) = self.stream else {
            return Err(BindError::NotALane);
        };
        if !agreed.clear {
            // The rest of the record in which the greeting ended. The lane reads the records behind it.
            self.frames.push(tls.take_decrypted().into());
        }
        let records = tls.into_records()?;
        let transport = if agreed.clear {
            Transport::Clear(records.into_clear().await?)
        } else {
            Transport::Tls(Box::new(records))
        };
        Ok(Lane::bound(transport, role, self.frames, agreed.kernel_tls))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_links_secret_is_cleared_when_it_is_dropped_and_never_printed() {
        fn clears(_secret: &impl zeroize::ZeroizeOnDrop) {}
        let secret = LinkSecret::random();
        clears(&secret.0);
        clears(&secret.reveal());
        assert_eq!(format!("{secret:?}"), "LinkSecret(***)");
    }
}
