//! Two connections whose bytes a sockmap forwards, with the programs of ADR 0017. The daemon has nothing of this.

mod object;
mod sockets;
mod stream;

pub(crate) use object::{Direction, EXPERIMENT, Sockmap, load};
pub(crate) use sockets::{Crossing, Sizes, report, reset, set_receive_low_water, taken_error};
pub(crate) use stream::{
    End, PATIENCE, QUIET, Stop, is_broken, is_readable, is_writable, pull, push, until,
};
