//! Byte streams, in clear text or TLS: configuration from files, reload, identities, record engine, kernel TLS.
//!
//! Owns keys, certificates and revocation lists, and the buffers that records are read into. Knows the ALPN names of the
//! protocols inside. Refuses to know who listens and who dials.
#![deny(unsafe_code)]

pub mod agent_identity;
pub mod blocks;
pub mod buffered;
mod ca;
pub mod cause;
pub mod cipher;
pub mod clear;
mod crl;
pub mod handshake;
mod identity;
pub mod inspect;
pub mod nested;
pub mod outbox;
mod pem;
pub mod pki;
pub mod principal;
pub mod records;
pub mod reload;
pub mod reread;
pub mod selfsigned;
mod sessions;
pub mod stream;
pub mod tls;
mod tls_error;
mod verifier;
