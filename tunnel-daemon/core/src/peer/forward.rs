//! The context of a forwarded dial, as it stands in an OPEN: records of type (1 byte), length (2 bytes) and value.

use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use crate::ids::DialId;
use crate::registry::{Scope, Strategy};
use crate::text::beginning;

/// Longest name of a client that is passed on, bytes.
const CLIENT_LEN_MAX: usize = 256;
/// Longest key that is passed on, bytes: no host of a dial is longer.
const KEY_LEN_MAX: usize = 4096;

const TENANT: u8 = 1;
const STRATEGY: u8 = 2;
const KEY: u8 = 3;
const TIME_LEFT: u8 = 4;
const OWNER: u8 = 5;
const DIAL: u8 = 6;
const CLIENT: u8 = 7;
/// Records from this number on must be understood.
const CRITICAL: u8 = 128;

/// The only tenant there is.
const DEFAULT_TENANT: &[u8] = b"default";

/// What a server says of a dial that it forwards.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Forward {
    /// The key under which the other server asks its agents.
    pub scope: Scope,
    /// Time left for the dial; `None`: no limit.
    pub time_left: Option<Duration>,
    /// Only agents of this owner may be asked; see [`crate::registry::Registry::pick_local`].
    pub owner: Option<u64>,
    /// The dial's id at the server that forwards it, for logs.
    pub dial: DialId,
    /// The client's name as that server knows it, for logs; may be empty. A claim.
    pub client: String,
}

/// Why the context of a forwarded dial cannot be used. The texts are for the peer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ForwardError {
    /// A record is cut off, or its value is not of its type.
    #[error("record {0} of a forwarded dial is invalid")]
    Invalid(u8),
    /// A record that must be understood and is not.
    #[error("record {0} of a forwarded dial is unknown here; this server is too old for it")]
    Unknown(u8),
    /// No strategy and key.
    #[error("a forwarded dial names no strategy and key that are known here")]
    NoKey,
    /// Another tenant.
    #[error("a forwarded dial is for a tenant that does not exist here")]
    Tenant,
}

/// Numbers of the strategies on the wire.
pub(crate) fn strategy_number(strategy: Strategy) -> u8 {
    match strategy {
        Strategy::Default => 1,
        Strategy::DestHost => 2,
        Strategy::DefaultRoute => 3,
        Strategy::DestCidr => 4,
    }
}

pub(crate) fn strategy_of(number: u32) -> Option<Strategy> {
    let mut all = Strategy::ALL.into_iter();
    all.find(|strategy| u32::from(strategy_number(*strategy)) == number)
}

impl Forward {
    /// The records.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        put(&mut out, STRATEGY, &[self.scope.strategy_number()]);
        put(&mut out, KEY, self.scope.key().as_bytes());
        if let Some(left) = self.time_left {
            let left = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
            put(&mut out, TIME_LEFT, &left.to_be_bytes());
        }
        if let Some(owner) = self.owner {
            put(&mut out, OWNER, &owner.to_be_bytes());
        }
        put(&mut out, DIAL, &self.dial.0.to_be_bytes());
        put(
            &mut out,
            CLIENT,
            beginning(&self.client, CLIENT_LEN_MAX).as_bytes(),
        );
        out.freeze()
    }

    /// Reads the records; unknown ones below 128 are skipped.
    ///
    /// # Errors
    /// See [`ForwardError`].
    pub fn decode(mut bytes: &[u8]) -> Result<Self, ForwardError> {
        let (mut strategy, mut key) = (None, None);
        let (mut time_left, mut owner) = (None, None);
        let (mut dial, mut client) = (DialId(0), String::new());
        while !bytes.is_empty() {
            let kind = bytes.get_u8();
            let invalid = ForwardError::Invalid(kind);
            let length = bytes.try_get_u16().map_err(|_short| invalid.clone())?;
            let (value, rest) = bytes
                .split_at_checked(length.into())
                .ok_or_else(|| invalid.clone())?;
            bytes = rest;
            match kind {
                TENANT if value != DEFAULT_TENANT => return Err(ForwardError::Tenant),
                TENANT => (),
                STRATEGY => {
                    let [number] = value else {
                        return Err(invalid);
                    };
                    strategy = strategy_of((*number).into());
                }
                KEY if value.len() <= KEY_LEN_MAX => {
                    key = Some(std::str::from_utf8(value).map_err(|_bad| invalid)?);
                }
                TIME_LEFT => {
                    let millis = u32::from_be_bytes(value.try_into().map_err(|_bad| invalid)?);
                    time_left = Some(Duration::from_millis(millis.into()));
                }
                OWNER => {
                    owner = Some(u64::from_be_bytes(
                        value.try_into().map_err(|_bad| invalid)?,
                    ));
                }
                DIAL => {
                    dial = DialId(i64::from_be_bytes(
                        value.try_into().map_err(|_bad| invalid)?,
                    ))
                }
                CLIENT if value.len() <= CLIENT_LEN_MAX => {
                    client = String::from_utf8_lossy(value).into_owned();
                }
                KEY | CLIENT => return Err(invalid),
                CRITICAL.. => return Err(ForwardError::Unknown(kind)),
                _ => (),
            }
        }
        let named = strategy.zip(key);
        let scope = named.and_then(|(strategy, key)| Scope::named(strategy, key));
        Ok(Self {
            scope: scope.ok_or(ForwardError::NoKey)?,
            time_left,
            owner,
            dial,
            client,
        })
    }
}

fn put(out: &mut BytesMut, kind: u8, value: &[u8]) {
    out.put_u8(kind);
    out.put_u16(u16::try_from(value.len()).unwrap_or(0));
    out.put_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(strategy: Strategy, key: &str) -> Forward {
        Forward {
            scope: Scope::named(strategy, key).expect("a key"),
            time_left: Some(Duration::from_millis(4321)),
            owner: Some(7),
            dial: DialId(99),
            client: "kube-apiserver".to_owned(),
        }
    }

    #[test]
    fn a_forwarded_dial_is_read_as_it_was_written_under_every_strategy() {
        for (strategy, key) in [
            (Strategy::Default, ""),
            (Strategy::DefaultRoute, ""),
            (Strategy::DestHost, "node-7.example"),
            (Strategy::DestHost, "fd00::7"),
            (Strategy::DestCidr, "10.0.0.0/8"),
        ] {
            let forward = forward(strategy, key);
            assert_eq!(Forward::decode(&forward.encode()).as_ref(), Ok(&forward));
        }
        let least = Forward {
            time_left: None,
            owner: None,
            client: String::new(),
            ..forward(Strategy::Default, "")
        };
        assert_eq!(Forward::decode(&least.encode()), Ok(least));
    }

    #[test]
    fn unknown_records_are_skipped_below_128_and_refused_from_there() {
        let forward = forward(Strategy::Default, "");
        let with = |kind: u8, value: &[u8]| {
            let mut bytes = BytesMut::from(&forward.encode()[..]);
            put(&mut bytes, kind, value);
            Forward::decode(&bytes)
        };
        assert_eq!(with(127, b"anything").as_ref(), Ok(&forward));
        assert_eq!(with(128, b""), Err(ForwardError::Unknown(128)));
        assert_eq!(with(TENANT, b"default").as_ref(), Ok(&forward));
        assert_eq!(with(TENANT, b"other"), Err(ForwardError::Tenant));
        assert_eq!(with(OWNER, b"short"), Err(ForwardError::Invalid(OWNER)));
        let long = vec![b'x'; CLIENT_LEN_MAX + 1];
        assert_eq!(with(CLIENT, &long), Err(ForwardError::Invalid(CLIENT)));
        assert_eq!(with(STRATEGY, &[9]), Err(ForwardError::NoKey));
        assert_eq!(Forward::decode(b""), Err(ForwardError::NoKey));
    }

    #[test]
    fn no_beginning_of_a_forwarded_dial_is_taken_for_another_dial() {
        let forward = forward(Strategy::DestHost, "node-7");
        let bytes = forward.encode();
        for length in 0..bytes.len() {
            if let Ok(read) = Forward::decode(&bytes[..length]) {
                assert_eq!(read.scope, forward.scope, "{length} bytes");
            }
        }
    }
}
