//! One client's connection to the HTTP proxy: requests one after the other, to any targets, or one CONNECT.

mod answer;
mod exchange;
mod idle;
mod request;
mod serve;
#[cfg(test)]
mod tests;

pub use answer::Refusal;
#[doc(hidden)]
pub use request::fuzz_entry;
pub use serve::{After, Connector, Parent, Proxy, Served, serve};
