//! The keys of one direction: derived from a traffic secret, used up record by record.

use std::io;
use std::sync::OnceLock;

use adit_core::tls13::{APPLICATION_DATA, HEADER_BYTES, RecordViolation, TAG_BYTES, content};
use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use aws_lc_rs::hkdf::{self, KeyType, Prk};
use rustls::{ConnectionTrafficSecrets, KeyLog};
use zeroize::Zeroizing;

use super::TakeOverError;

/// Stores the traffic secrets of one handshake, from which later keys are derived. Logs nothing.
#[derive(Default)]
pub(crate) struct TrafficSecrets {
    pub(super) client: OnceLock<Zeroizing<Vec<u8>>>,
    pub(super) server: OnceLock<Zeroizing<Vec<u8>>>,
}

impl TrafficSecrets {
    fn slot(&self, label: &str) -> Option<&OnceLock<Zeroizing<Vec<u8>>>> {
        match label {
            "CLIENT_TRAFFIC_SECRET_0" => Some(&self.client),
            "SERVER_TRAFFIC_SECRET_0" => Some(&self.server),
            _ => None,
        }
    }
}

impl KeyLog for TrafficSecrets {
    fn log(&self, label: &str, _client_random: &[u8], secret: &[u8]) {
        if let Some(slot) = self.slot(label) {
            // Each secret comes once per connection.
            let _first = slot.set(Zeroizing::new(secret.to_vec()));
        }
    }

    fn will_log(&self, label: &str) -> bool {
        self.slot(label).is_some()
    }
}

impl std::fmt::Debug for TrafficSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TrafficSecrets(***)")
    }
}

/// Keys of one direction.
///
/// Dropping clears all of them: the secret and the IV here, the key in the library.
pub(super) struct Half {
    pub(super) suite: &'static Suite,
    key: LessSafeKey,
    pub(super) iv: Zeroizing<[u8; 12]>,
    pub(super) sequence: u64,
    /// Records sealed or opened with this key.
    pub(super) records: u64,
    pub(super) secret: Zeroizing<Vec<u8>>,
}

/// What a cipher suite is made of.
pub(super) struct Suite {
    pub(super) aead: &'static aws_lc_rs::aead::Algorithm,
    hkdf: hkdf::Algorithm,
}

static AES_128: Suite = Suite {
    aead: &AES_128_GCM,
    hkdf: hkdf::HKDF_SHA256,
};
static AES_256: Suite = Suite {
    aead: &AES_256_GCM,
    hkdf: hkdf::HKDF_SHA384,
};
pub(super) static CHACHA: Suite = Suite {
    aead: &CHACHA20_POLY1305,
    hkdf: hkdf::HKDF_SHA256,
};

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

const BAD_SECRET: TakeOverError =
    TakeOverError::Session("its traffic secret does not fit its keys");

impl Half {
    /// From rustls' sequence number and keys, and the secret they were derived from.
    pub(super) fn new(
        (sequence, keys): (u64, ConnectionTrafficSecrets),
        secret: Option<&Zeroizing<Vec<u8>>>,
    ) -> Result<Self, TakeOverError> {
        let (suite, key, iv) = match &keys {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA, key, iv),
            _ => return Err(TakeOverError::Session("its cipher suite is not known")),
        };
        let secret = secret.ok_or(BAD_SECRET)?.clone();
        let half = Self::derived(suite, secret, sequence).map_err(|_unfit| BAD_SECRET)?;
        // The key could be compared only by what it seals; the derived IV proves the secret as well.
        let expected = (iv.as_ref(), key.as_ref().len());
        if (&half.iv[..], suite.aead.key_len()) != expected {
            return Err(BAD_SECRET);
        }
        Ok(half)
    }

    fn derived(
        suite: &'static Suite,
        secret: Zeroizing<Vec<u8>>,
        sequence: u64,
    ) -> io::Result<Self> {
        let mut key = Zeroizing::new([0_u8; 32]);
        let key = key.get_mut(..suite.aead.key_len()).unwrap_or_default();
        expand_label(suite, &secret, b"key", key)?;
        let mut iv = Zeroizing::new([0_u8; 12]);
        expand_label(suite, &secret, b"iv", &mut iv[..])?;
        let key = UnboundKey::new(suite.aead, key).map_err(|_length| broken("bad key length"))?;
        Ok(Self {
            suite,
            key: LessSafeKey::new(key),
            iv,
            sequence,
            records: 0,
            secret,
        })
    }

    /// The same keys and numbers once more.
    #[cfg(test)]
    pub(super) fn copy(&self) -> Self {
        Self::derived(self.suite, self.secret.clone(), self.sequence).unwrap()
    }

    /// Moves on to the next keys (RFC 8446 section 7.2).
    pub(super) fn update(&mut self) -> io::Result<()> {
        let mut secret = Zeroizing::new(vec![0_u8; self.secret.len()]);
        expand_label(self.suite, &self.secret, b"traffic upd", &mut secret)?;
        *self = Self::derived(self.suite, secret, 0)?;
        Ok(())
    }

    /// The nonce of RFC 8446 section 5.3. Each sequence number is used once: it is incremented only here.
    fn nonce(&mut self) -> io::Result<Nonce> {
        let mut nonce = *self.iv;
        for (byte, number) in nonce.iter_mut().skip(4).zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        let next = self.sequence.checked_add(1);
        self.sequence = next.ok_or_else(|| broken("out of sequence numbers"))?;
        self.records += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// Seals the bytes after the header in `record`, up to the room for the tag at its end.
    pub(super) fn seal(&mut self, record: &mut [u8]) -> io::Result<()> {
        let sealed = u16::try_from(record.len() - HEADER_BYTES);
        let [high, low] = sealed
            .map_err(|_long| broken("record too long"))?
            .to_be_bytes();
        let header = [APPLICATION_DATA, 3, 3, high, low];
        let (head, rest) = record.split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&header);
        let (plain, room) = rest.split_at_mut(rest.len() - TAG_BYTES);
        let nonce = self.nonce()?;
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(header), plain)
            .map_err(|_failed| broken("cannot seal"))?;
        room.copy_from_slice(tag.as_ref());
        Ok(())
    }

    /// Opens a record in place; returns its type and how many bytes after the header are plain text.
    pub(super) fn open(&mut self, record: &mut [u8]) -> io::Result<(u8, usize)> {
        let Some((header, sealed)) = record.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Err(broken("a record has no header"));
        };
        let nonce = self.nonce()?;
        let plain = self
            .key
            .open_in_place(nonce, Aad::from(*header), sealed)
            .map_err(|_forged| broken("a record does not verify"))?;
        content(plain).map_err(violated)
    }
}

/// HKDF-Expand-Label with an empty context (RFC 8446 section 7.1).
pub(super) fn expand_label(
    suite: &Suite,
    secret: &[u8],
    label: &[u8],
    out: &mut [u8],
) -> io::Result<()> {
    let length = u16::try_from(out.len()).unwrap_or(u16::MAX).to_be_bytes();
    let label_length = [u8::try_from(6 + label.len()).unwrap_or(u8::MAX)];
    let info: [&[u8]; 5] = [&length, &label_length, b"tls13 ", label, &[0]];
    Prk::new_less_safe(suite.hkdf, secret)
        .expand(&info, Length(out.len()))
        .and_then(|okm| okm.fill(out))
        .map_err(|_length| broken("cannot derive keys"))
}

pub(super) fn violated(violation: RecordViolation) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, violation)
}

pub(super) fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
