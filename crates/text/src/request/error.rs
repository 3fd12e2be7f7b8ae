//! Why a request was refused.

use serde_json::{Value, json};

use crate::TextError;

/// A refused request, with what the HTTP answer says (spec section 8.4).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// HTTP status.
    pub status: u16,
    /// `error.type`, which `error.code` repeats.
    pub kind: &'static str,
    /// One sentence for the person who sent the request.
    pub message: String,
}

impl RequestError {
    /// A request that is malformed or asks for what is not supported: 400.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "invalid_request_error", message: message.into() }
    }

    /// A fault on this side: 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { status: 500, kind: "internal_error", message: message.into() }
    }

    /// The body of the HTTP answer on the OpenAI paths.
    pub fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": null, "code": self.kind}})
    }
}

impl From<TextError> for RequestError {
    /// An id that the request names is its own fault, everything else is the server's.
    fn from(error: TextError) -> Self {
        match error {
            TextError::UnknownId { .. } => Self::invalid(error.to_string()),
            _ => Self::internal(error.to_string()),
        }
    }
}

/// Shorthand of the request modules.
pub(super) type Result<T> = std::result::Result<T, RequestError>;

pub(super) fn invalid<T>(message: impl Into<String>) -> Result<T> {
    Err(RequestError::invalid(message))
}
