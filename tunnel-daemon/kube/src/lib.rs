//! The Kubernetes API as Adit uses it: who holds a service account token, which servers have leases,
//! and which addresses Services have.
//!
//! Knows nothing of tunnels. A caller's origin is an address and a flag; outcomes of requests go to the caller's events.

pub mod access;
pub mod account;
mod fair_slots;
pub mod leases;
pub mod no_proxy;
pub mod request;
pub mod review_policy;
pub mod reviewer;
pub mod services;
pub mod sha256;
pub mod token;
mod words;
