use std::fmt;

use crate::Status;

impl Status {
    /// `UCS_STATUS_IS_ERR`: true for every value below zero. [`Status::INPROGRESS`] is not an error.
    pub const fn is_err(self) -> bool {
        self.0 < 0
    }

    /// `UCS_IS_LINK_ERROR`: the link is gone, the endpoint may go on over another.
    pub const fn is_link_error(self) -> bool {
        self.0 <= Self::ERR_FIRST_LINK_FAILURE.0 && self.0 >= Self::ERR_LAST_LINK_FAILURE.0
    }

    /// `UCS_IS_ENDPOINT_ERROR`: the endpoint is gone. The converse does not hold: a dead peer is also reported as
    /// [`Status::ERR_CONNECTION_RESET`] or [`Status::ERR_IO_ERROR`], which lie outside this range.
    pub const fn is_endpoint_error(self) -> bool {
        self.0 <= Self::ERR_FIRST_ENDPOINT_FAILURE.0 && self.0 >= Self::ERR_LAST_ENDPOINT_FAILURE.0
    }

    /// The status as a result, for functions that return one and have nothing else to say.
    ///
    /// # Errors
    ///
    /// The status itself when it is an error.
    pub const fn check(self) -> Result<(), Status> {
        if self.is_err() { Err(self) } else { Ok(()) }
    }

    /// What `ucs_status_string` says in UCX 1.13 to 1.22, without a library; `None` for codes that they do not know.
    pub const fn text(self) -> Option<&'static str> {
        Some(match self {
            Self::OK => "Success",
            Self::INPROGRESS => "Operation in progress",
            Self::ERR_NO_MESSAGE => "No pending message",
            Self::ERR_NO_RESOURCE => "No resources are available to initiate the operation",
            Self::ERR_IO_ERROR => "Input/output error",
            Self::ERR_NO_MEMORY => "Out of memory",
            Self::ERR_INVALID_PARAM => "Invalid parameter",
            Self::ERR_UNREACHABLE => "Destination is unreachable",
            Self::ERR_INVALID_ADDR => "Address not valid",
            Self::ERR_NOT_IMPLEMENTED => "Function not implemented",
            Self::ERR_MESSAGE_TRUNCATED => "Message truncated",
            Self::ERR_NO_PROGRESS => "No progress",
            Self::ERR_BUFFER_TOO_SMALL => "Provided buffer is too small",
            Self::ERR_NO_ELEM => "No such element",
            Self::ERR_SOME_CONNECTS_FAILED => "Failed to connect some of the requested endpoints",
            Self::ERR_NO_DEVICE => "No such device",
            Self::ERR_BUSY => "Device is busy",
            Self::ERR_CANCELED => "Request canceled",
            Self::ERR_SHMEM_SEGMENT => "Shared memory error",
            Self::ERR_ALREADY_EXISTS => "Element already exists",
            Self::ERR_OUT_OF_RANGE => "Index out of range",
            Self::ERR_TIMED_OUT => "Operation timed out",
            Self::ERR_EXCEEDS_LIMIT => "User-defined limit was reached",
            Self::ERR_UNSUPPORTED => "Unsupported operation",
            Self::ERR_REJECTED => "Operation rejected by remote peer",
            Self::ERR_NOT_CONNECTED => "Endpoint is not connected",
            Self::ERR_CONNECTION_RESET => "Connection reset by remote peer",
            Self::ERR_ENDPOINT_TIMEOUT => "Endpoint timeout",
            _ => return None,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} (UCX status {})", self.0),
            None => write!(f, "UCX status {}", self.0),
        }
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use crate::Status;

    #[test]
    fn a_status_prints_its_text_and_number() {
        assert_eq!(Status::ERR_CONNECTION_RESET.to_string(), "Connection reset by remote peer (UCX status -25)");
        assert_eq!(Status(-77).to_string(), "UCX status -77");
    }

    #[test]
    fn only_negative_values_are_errors() {
        assert_eq!(Status::OK.check(), Ok(()));
        assert_eq!(Status::INPROGRESS.check(), Ok(()));
        assert_eq!(Status::ERR_BUSY.check(), Err(Status::ERR_BUSY));
        assert_eq!(Status(-128).check(), Err(Status(-128)));
    }

    #[test]
    fn error_ranges_are_those_of_the_header() {
        assert!(Status::ERR_ENDPOINT_TIMEOUT.is_endpoint_error());
        assert!(!Status::ERR_CONNECTION_RESET.is_endpoint_error());
        assert!(Status(-40).is_link_error() && Status(-59).is_link_error());
        assert!(!Status(-39).is_link_error() && !Status(-60).is_link_error());
    }
}
