// A function that is not durable, and needs no package.
export async function double(event, context) {
  if (event.n === undefined) throw new TypeError("n is missing");
  return { doubled: event.n * 2, left: context.getRemainingTimeInMillis() > 0, arn: context.invokedFunctionArn };
}
